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

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/cgroup"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/handler/serve"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/qemu"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// sandbox is a pod in the process that supervises its virtual machine.
type sandbox struct {
	cfg    Config
	id     string
	podUID string
	dir    sandboxDir
	self   process.Process
	shim   process.Process

	share    share
	machine  *qemu.Machine
	guest    *wire.Client
	volumes  *volumes
	changing sync.Mutex // held while a container is created or deleted

	hung     chan error    // why the guest is to be killed
	stop     chan struct{} // closed when the sandbox is to end
	stopOnce sync.Once
}

// sharedTag is the tag of the guest's virtio-fs.
const sharedTag = "shared"

// supervise runs a sandbox until it ends. It writes readyWord to ready once the sandbox is up,
// or else the error, and closes it.
func supervise(cfg Config, id, bundle string, shim process.Process, ready io.WriteCloser) error {
	s := &sandbox{
		cfg: cfg, id: id, dir: cfg.sandbox(id), share: cfg.sandbox(id).share(), shim: shim,
		hung: make(chan error, 1), stop: make(chan struct{}),
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer s.close()
	err, word := s.start(ctx, bundle), readyWord
	if err != nil {
		word = err.Error()
	}
	_, writeErr := io.WriteString(ready, word)
	if err := errors.Join(err, writeErr, ready.Close()); err != nil {
		return err
	}
	ctx = s.whileAnswering(ctx)
	why := s.watch(ctx)
	s.requestStop()
	if !sys.IsClosed(s.machine.Done()) && !sys.IsClosed(s.guest.Done()) {
		s.shutdownGuest(ctx)
	}
	return why
}

// start boots the machine and serves the sockets.
func (s *sandbox) start(ctx context.Context, bundle string) (err error) {
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
	r := &record{ID: s.id, Sandbox: s.id, Bundle: bundle, Process: s.self, Shim: s.shim, Group: cgroup.Path(spec.Linux.CgroupsPath)}
	if err := errors.Join(s.cfg.writeRecord(r), cgroup.Join(s.self.PID, r.Group)); err != nil {
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
	req := &wire.StartSandboxRequest{Hostname: spec.Hostname, UnixNanos: time.Now().UnixNano(), SharedTag: sharedTag, Sysctls: spec.Linux.Sysctl}
	if _, err := s.guest.StartSandbox(ctx, req); err != nil {
		return s.withConsole(err)
	}
	s.volumes = &volumes{sandbox: s.id, machine: s.machine, guest: s.guest, byName: make(map[string]*attachedVolume)}
	return s.serve(context.WithoutCancel(ctx))
}

// limit limits this process, and so QEMU and virtiofsd: a core has the guest's memory, and virtiofsd keeps a file open for
// each that the guest has looked up: at 512 bytes a file, the guest runs short of memory first, and forgets some. The
// shim's oom_score_adj is nearly containerd's, which is hardly ever killed.
func (s *sandbox) limit() {
	for resource, most := range map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_NOFILE: uint64(s.cfg.MemoryMiB) << 11} { //nolint:gosec // checked
		var is unix.Rlimit
		if unix.Getrlimit(resource, &is) == nil {
			is.Max = min(is.Max, most)
			is.Cur = is.Max
			_ = unix.Setrlimit(resource, &is)
		}
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("0"), 0)
}

// boot starts the machine and waits until its agent answers.
func (s *sandbox) boot(ctx context.Context) (err error) {
	s.limit()
	user := s.cfg.FirstUser + uint32(os.Getpid()) //nolint:gosec // at most four million
	kvm, err := s.cfg.usesKVM(user)
	if err != nil {
		return err
	}
	image, archive, err := initramfs.Build(s.cfg.Kernel, s.cfg.AgentProgram, s.cfg.cache())
	if err != nil {
		return fmt.Errorf("the guest's initramfs: %w", err)
	}
	s.machine, err = qemu.Start(ctx, qemu.Config{
		Program: s.cfg.QEMU, Virtiofsd: s.cfg.Virtiofsd, Kernel: image, Initramfs: archive,
		Append: initramfs.KernelArguments, KVM: kvm, MemoryMiB: s.cfg.MemoryMiB, CPUs: s.cfg.CPUs, User: user,
		Shared: s.share.mount, Tag: sharedTag, Port: wire.Port, Dir: string(s.dir),
	})
	if err != nil {
		return err
	}
	s.guest = wire.NewClient(s.machine.Agent)
	if err := s.waitForAgent(ctx); err != nil {
		return s.withConsole(err)
	}
	return nil
}

func (s *sandbox) waitForAgent(ctx context.Context) error {
	done := make(chan error, 1)
	go func() {
		for {
			_, err := s.guest.Ping(ctx, &wire.PingRequest{})
			if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
				done <- err
				return
			}
		}
	}()
	select {
	case err := <-done:
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = fmt.Errorf("the guest did not boot in bootTimeoutSeconds (%v): %w", s.cfg.bootTime(), err)
		}
		return err
	case <-s.machine.Done():
		return errors.New("the machine ended while it booted")
	case <-s.machine.FSDone():
		return errNoFiles
	}
}

// withConsole adds three lines of the guest's console.
func (s *sandbox) withConsole(err error) error {
	return fmt.Errorf("%w (the guest's console: %q)", err, sys.Clip(lastWords(s.machine.Console.String())))
}

// lastWords are three lines: from the one that says why the machine ends, or the last ones. A
// disk that is in use at the end is good for any number of errors of input and output.
func lastWords(console string) string {
	lines := strings.Split(strings.TrimSpace(console), "\n")
	from := slices.IndexFunc(lines, func(line string) bool {
		return strings.Contains(line, "panic") || strings.Contains(line, initramfs.MachineEnds)
	})
	if from < 0 {
		from = max(0, len(lines)-3)
	}
	return strings.Join(lines[from:min(len(lines), from+3)], "; ")
}

func (s *sandbox) serve(ctx context.Context) error {
	control, err := listen(s.dir.controlSocket())
	if err != nil {
		return err
	}
	volumes, err := listen(s.dir.volumesSocket())
	if err != nil {
		return err
	}
	go func() { _ = s.serveControl(ctx, control) }()
	go func() { _ = serve.New(s.volumes).Serve(volumes) }()
	return nil
}

func (s *sandbox) requestStop() { s.stopOnce.Do(func() { close(s.stop) }) }

// watch returns when the sandbox is to end, with the reason if it is an error. ctx ends when the agent does not answer.
func (s *sandbox) watch(ctx context.Context) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	tick := time.NewTicker(shimCheckInterval)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return nil
		case <-signals:
			return nil
		case <-s.machine.Done():
			return s.connectionLost(nil)
		case <-s.guest.Done():
			return s.connectionLost(wire.ErrBroken)
		case <-s.machine.FSDone():
			return s.connectionLost(errNoFiles)
		case err := <-s.hung:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			if s.shim.Ended() {
				return errors.New("the shim of the sandbox is gone")
			}
		}
	}
}

var errNoFiles = errors.New("virtiofsd has ended")

// connectionLost returns why the connection to the guest or to virtiofsd has ended: the machine has, or the other reason.
func (s *sandbox) connectionLost(other error) error {
	select {
	case <-s.machine.Done():
		return s.withConsole(fmt.Errorf("the machine has ended: %w", s.machine.Err()))
	case <-time.After(20 * time.Second): // on a busy node QEMU takes as long from closing the connection to its end
		return other
	}
}

const (
	shimCheckInterval = time.Second
	// maxFailedPings is after how many unanswered pings in a row the guest counts as hung.
	maxFailedPings = 3
)

var errHung = errors.New("the guest hangs")

// declareHung ends the sandbox because of a container that does not end. The agent may answer: then it still syncs the
// volumes, as a process whose fsync is slow cannot be killed either.
func (s *sandbox) declareHung(why error) {
	select {
	case s.hung <- why:
	default: // it is ending
	}
}

// whileAnswering returns a context that ends when the guest's agent does not answer any more.
func (s *sandbox) whileAnswering(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() { cancel(s.monitorPings(ctx)) }()
	return ctx
}

// monitorPings returns when the guest's agent does not answer any more.
func (s *sandbox) monitorPings(ctx context.Context) error {
	for failed := 0; failed < maxFailedPings; {
		if !sys.Sleep(ctx, s.cfg.pingTime()) {
			return ctx.Err()
		}
		asking, cancel := context.WithTimeout(ctx, s.cfg.pingTime())
		_, err := s.guest.Ping(asking, &wire.PingRequest{})
		cancel()
		if failed++; err == nil {
			failed = 0
		}
	}
	return fmt.Errorf("%w: its agent does not answer", errHung)
}

// enforceKill declares the guest hung if a killed container does not end. The container has
// ended when its proxy has: that is what the container runtime sees.
func (s *sandbox) enforceKill(container string) {
	r, err := s.cfg.findRecord(container)
	for err == nil && !waitEnded(r.Process, s.cfg.hangTime()+drainTimeout) {
		if !s.volumes.frozen() {
			s.declareHung(fmt.Errorf("%w: container %s was killed, and does not end", errHung, container))
			return
		}
	}
}

// enforceEnd declares the guest hung if an exec outlives its container, whose end containerd does
// not report before. ctx is done when the exec has ended.
func (s *sandbox) enforceEnd(ctx context.Context, container string) {
	for ended := 0; sys.Sleep(ctx, s.cfg.hangTime()); {
		r, err := s.cfg.findRecord(container)
		if !errors.Is(err, errUnknown) && (err != nil || !r.Process.Ended()) {
			continue
		}
		if ended++; s.volumes.frozen() {
			ended = 0
		}
		if ended > 1 {
			s.declareHung(fmt.Errorf("%w: container %s has ended, and a process of it does not", errHung, container))
			return
		}
	}
}

const (
	// shutdownTimeout bounds the orderly shutdown of a guest, whose volumes may be slow to write what is dirty.
	// powerOffTimeout bounds the end of its machine after that.
	shutdownTimeout = 5 * time.Minute
	powerOffTimeout = 5 * time.Second
)

// shutdownGuest lets the guest write and unmount its volumes and unplugs its disks, until ctx ends: as long as the agent
// answers. What it does not release is released when the machine is killed.
func (s *sandbox) shutdownGuest(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	if err := s.volumes.detachAll(ctx); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "unplug:", err)
	}
	failpoint.Hit("crust-vm-unplugged")
	reply, err := s.guest.Shutdown(ctx, &wire.ShutdownRequest{})
	for _, text := range reply.GetErrors() {
		_, _ = fmt.Fprintln(os.Stderr, "the guest's shutdown:", text)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "the guest's shutdown:", err)
		return
	}
	select {
	case <-s.machine.Done():
	case <-time.After(powerOffTimeout):
	}
}

// close releases everything but the record, which stays until the sandbox is deleted.
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
	_ = remove(s.dir.controlSocket(), s.dir.volumesSocket())
}

// usesKVM reports whether machines run with KVM. The result of the trial is cached until the
// next boot of the node, unless it took too long.
func (c Config) usesKVM(user uint32) (bool, error) {
	if c.Accel != "" {
		return c.Accel == accelKVM, nil
	}
	if err := os.MkdirAll(c.cache(), 0o700); err != nil {
		return false, err
	}
	file := c.cache() + "/accel"
	if known, err := sys.ReadLine(file); err == nil && (known == accelKVM || known == accelTCG) {
		return known == accelKVM, nil
	}
	found := accelKVM
	if err := qemu.ProbeKVM(c.QEMU, user); err != nil {
		found = accelTCG
		_, _ = fmt.Fprintln(os.Stderr, "machines are emulated, and slow: KVM cannot be used:", err)
		if errors.Is(err, context.DeadlineExceeded) {
			return false, nil // the node may be busy now
		}
	}
	_ = sys.WriteSynced(file, []byte(found+"\n")) // it fails when another sandbox is as fast
	return found == accelKVM, nil
}
