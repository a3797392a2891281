package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/handler/serve"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/qemu"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// sandbox is a pod: a virtual machine, and the process that supervises it.
type sandbox struct {
	cfg    Config
	id     string
	podUID string
	place  place
	self   process.Process
	shim   process.Process

	share   share
	machine *qemu.Machine
	guest   *wire.Client
	volumes *volumes
	making  sync.Mutex // held while a container is made or removed

	hangs    chan error    // why its guest is to be killed
	stop     chan struct{} // closed when the sandbox is to end
	stopOnce sync.Once
}

// sharedTag is the name of the guest's filesystem of the host.
const sharedTag = "shared"

// supervise is the life of a sandbox. It tells ready how it began, and closes it.
func supervise(cfg Config, id, bundle string, shim process.Process, ready io.WriteCloser) error {
	s := &sandbox{
		cfg: cfg, id: id, place: cfg.sandbox(id), share: cfg.sandbox(id).share(), shim: shim,
		hangs: make(chan error, 1), stop: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer s.close()
	err, word := s.begin(ctx, bundle), readyWord
	if err != nil {
		word = err.Error()
	}
	_, told := io.WriteString(ready, word)
	if err := errors.Join(err, told, ready.Close()); err != nil {
		return err
	}
	why := s.watch(ctx)
	s.shutdown()
	if !errors.Is(why, errHangs) {
		s.end(ctx)
	}
	return why
}

// begin boots the machine and serves.
func (s *sandbox) begin(ctx context.Context, bundle string) (err error) {
	spec, err := readSpec(bundle)
	if err != nil {
		return err
	}
	of, _ := oci.SandboxOf(spec)
	s.podUID = of.PodUID
	found, err := oci.Find(oci.Config{Root: s.cfg.Root}, spec, s.podUID)
	for _, m := range found {
		err = errors.Join(err, m.Close(), handler.VolumeError(m, errors.New("a sandbox itself can have no deferred volume: only its containers can")))
	}
	if err != nil {
		return err
	}
	if s.self, err = process.Of(os.Getpid()); err != nil {
		return err
	}
	r := &record{ID: s.id, Sandbox: s.id, Bundle: bundle, Process: s.self, Shim: s.shim, Group: groupOf(spec)}
	if err := errors.Join(s.cfg.write(r), r.join(s.self.PID)); err != nil {
		return err
	}
	if err := s.share.open(); err != nil {
		return fmt.Errorf("the directory for the guest cannot be made: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.bootTime())
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return err
	}
	req := &wire.StartSandboxRequest{Hostname: spec.Hostname, UnixNanos: time.Now().UnixNano(), Sysctls: spec.Linux.Sysctl}
	if s.cfg.Virtiofsd != "" {
		req.SharedTag = sharedTag
	}
	if _, err := s.guest.StartSandbox(ctx, req); err != nil {
		return s.because(err)
	}
	s.volumes = &volumes{sandbox: s.id, machine: s.machine, guest: s.guest, of: make(map[string]*attached)}
	return s.listen(context.WithoutCancel(ctx))
}

// boot starts the machine and waits for the agent's first word.
func (s *sandbox) boot(ctx context.Context) (err error) {
	raiseFileLimit()
	user := s.cfg.FirstUser + uint32(os.Getpid()) //nolint:gosec // at most four million
	kvm, err := s.cfg.usesKVM(user)
	if err != nil {
		return err
	}
	image, archive, err := initramfs.Build(s.cfg.Kernel, s.cfg.AgentProgram, s.cfg.cache())
	if err != nil {
		return fmt.Errorf("the guest's first filesystem: %w", err)
	}
	s.machine, err = qemu.Start(ctx, qemu.Config{
		Program: s.cfg.QEMU, Virtiofsd: s.cfg.Virtiofsd, Kernel: image, Initramfs: archive,
		Append: initramfs.KernelArguments, KVM: kvm, MemoryMiB: s.cfg.MemoryMiB, CPUs: s.cfg.CPUs, User: user,
		Shared: s.share.shown, Tag: sharedTag, Port: wire.Port, Dir: string(s.place),
	})
	if err != nil {
		return err
	}
	s.guest = wire.NewClient(s.machine.Agent)
	if err := s.awaitAgent(ctx); err != nil {
		return s.because(err)
	}
	return nil
}

func (s *sandbox) awaitAgent(ctx context.Context) error {
	stopped := make(chan error, 1)
	go func() {
		for {
			_, err := s.guest.Ping(ctx, &wire.PingRequest{})
			if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
				stopped <- err
				return
			}
		}
	}()
	select {
	case err := <-stopped:
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = fmt.Errorf("the guest did not boot in bootTimeoutSeconds (%v): %w", s.cfg.bootTime(), err)
		}
		return err
	case <-s.machine.Done():
		return errors.New("the machine ended while it booted")
	}
}

// because adds what the guest's kernel said last, or why it panicked.
func (s *sandbox) because(err error) error {
	lines := strings.Split(strings.TrimSpace(s.machine.Console.String()), "\n")
	from := max(0, len(lines)-3)
	if panicked := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, "panic") }); panicked >= 0 {
		from = panicked
	}
	return fmt.Errorf("%w (the guest's console: %q)", err, sys.Clip(strings.Join(lines[from:min(len(lines), from+3)], "; ")))
}

func (s *sandbox) listen(ctx context.Context) error {
	control, err := listen(s.place.control())
	if err != nil {
		return err
	}
	asked, err := listen(s.place.volumes())
	if err != nil {
		return err
	}
	go func() { _ = s.serveControl(ctx, control) }()
	go func() { _ = serve.New(s.volumes).Serve(asked) }()
	return nil
}

func (s *sandbox) shutdown() { s.stopOnce.Do(func() { close(s.stop) }) }

// watch returns when the sandbox is to end, and says why.
func (s *sandbox) watch(ctx context.Context) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	tick := time.NewTicker(lookTime)
	defer tick.Stop()
	go func() { s.hang(s.pings(ctx)) }()
	for {
		select {
		case <-s.stop:
			return nil
		case <-signals:
			return nil
		case <-s.machine.Done():
			return s.lost()
		case <-s.guest.Done():
			return s.lost()
		case err := <-s.hangs:
			return err
		case <-tick.C:
			if s.shim.Ended() {
				return errors.New("the shim of the sandbox is gone")
			}
		}
	}
}

// lost says why the connection to the guest is over: a machine that ends closes it, too.
func (s *sandbox) lost() error {
	select {
	case <-s.machine.Done():
		return s.because(fmt.Errorf("the machine has ended: %w", s.machine.Err()))
	case <-time.After(lookTime):
		return wire.ErrBroken
	}
}

const (
	// lookTime is how often it is looked whether the shim lives.
	lookTime = time.Second
	// maxFailedPings is how many pings in a row fail where a guest hangs.
	maxFailedPings = 3
)

var errHangs = errors.New("the guest hangs")

// hang has the guest be killed, as one that an orderly end cannot be expected of.
func (s *sandbox) hang(why error) {
	select {
	case s.hangs <- why:
	default: // it is about to be
	}
}

// pings returns when the guest's agent does not answer.
func (s *sandbox) pings(ctx context.Context) error {
	for failed := 0; failed < maxFailedPings; {
		if !sys.Sleep(ctx, s.cfg.pingTime()) {
			return ctx.Err()
		}
		failed++
		if s.ping(ctx) == nil {
			failed = 0
		}
	}
	return fmt.Errorf("%w: its agent does not answer", errHangs)
}

// mustEnd looks whether a container that was killed ends. For the container runtime it has
// when the process has that stands for it.
func (s *sandbox) mustEnd(container string) {
	r, err := s.cfg.find(container)
	for err == nil && !gone(r.Process, s.cfg.hangTime()+drainTime) {
		if !s.volumes.frozen() {
			s.hang(fmt.Errorf("%w: container %s was killed, and does not end", errHangs, container))
			return
		}
	}
}

func (s *sandbox) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.pingTime())
	defer cancel()
	_, err := s.guest.Ping(ctx, &wire.PingRequest{})
	return err
}

// shutdownTime bounds the orderly end of a guest, and powerTime that of its machine.
const (
	shutdownTime = 30 * time.Second
	powerTime    = 5 * time.Second
)

// end lets the guest unmount everything, if it still can, and takes its disks back. What it
// does not let go of goes with the machine.
func (s *sandbox) end(ctx context.Context) {
	select {
	case <-s.machine.Done():
		return
	case <-s.guest.Done():
		return
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, shutdownTime)
	defer cancel()
	if err := s.volumes.unplugAll(ctx); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "unplug:", err)
	}
	failpoint.Hit("crust-vm-unplugged")
	said, err := s.guest.Shutdown(ctx, &wire.ShutdownRequest{})
	for _, text := range said.GetErrors() {
		_, _ = fmt.Fprintln(os.Stderr, "the guest's shutdown:", text)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "the guest's shutdown:", err)
		return
	}
	select {
	case <-s.machine.Done():
	case <-time.After(powerTime):
	}
}

// close gives everything up; the record stays until the sandbox is deleted.
func (s *sandbox) close() {
	if s.guest != nil {
		_ = s.guest.Close()
	}
	if s.machine != nil {
		s.machine.Kill()
	}
	if err := s.share.close(); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "clean up:", err)
	}
	for _, path := range []string{s.place.control(), s.place.volumes()} {
		_ = os.Remove(path)
	}
}

// raiseFileLimit is for virtiofsd, which has a file open for each one that the guest has
// looked at.
func raiseFileLimit() {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		limit.Cur = limit.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	}
}

// usesKVM tells whether machines run by KVM. That none does is found out once a boot.
func (c Config) usesKVM(user uint32) (bool, error) {
	if c.Accel != "" {
		return c.Accel == accelKVM, nil
	}
	if err := os.MkdirAll(c.cache(), 0o700); err != nil {
		return false, err
	}
	file := c.cache() + "/accel"
	if known, err := sys.ReadLine(file); err == nil {
		return known == accelKVM, nil
	}
	found := accelKVM
	if err := qemu.ProbeKVM(c.QEMU, user); err != nil {
		found = accelTCG
		_, _ = fmt.Fprintln(os.Stderr, "machines are emulated, and slow: KVM cannot be used:", err)
	}
	return found == accelKVM, os.WriteFile(file, []byte(found+"\n"), 0o600)
}
