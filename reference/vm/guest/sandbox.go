package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// sandbox serves the calls about the machine as a whole.
type sandbox struct {
	volumes    *volumes
	containers *containers
}

// agent serves the host.
func agent() error {
	// The OOM killer must not choose the agent.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		return err
	}
	v := newVolumes()
	c := &containers{volumes: v, byID: make(map[string]*container)}
	port := &ports{name: wire.Port, free: make(chan struct{}, 1)}
	port.free <- struct{}{}
	return wire.Serve(context.Background(), port, codeOf, func(server *ttrpc.Server) {
		wire.RegisterSandboxService(server, &sandbox{volumes: v, containers: c})
		wire.RegisterVolumesService(server, v)
		wire.RegisterContainersService(server, c)
	})
}

func (s *sandbox) Ping(context.Context, *wire.PingRequest) (*wire.PingResponse, error) {
	return &wire.PingResponse{Protocol: wire.Protocol}, nil
}

func (s *sandbox) StartSandbox(_ context.Context, req *wire.StartSandboxRequest) (*wire.Empty, error) {
	now := unix.NsecToTimeval(req.GetUnixNanos())
	if err := unix.Settimeofday(&now); err != nil {
		return nil, fmt.Errorf("set the clock: %w", err)
	}
	if err := unix.Sethostname([]byte(req.GetHostname())); err != nil {
		return nil, fmt.Errorf("set the host name: %w", err)
	}
	if err := setSysctls(req.GetSysctls()); err != nil {
		return nil, err
	}
	if err := upLoopback(); err != nil {
		return nil, fmt.Errorf("the loopback interface: %w", err)
	}
	if tag := req.GetSharedTag(); tag != "" {
		if err := errors.Join(initramfs.Load("virtiofs"), os.MkdirAll(wire.SharedDir, 0o755), //nolint:gosec // as roots are
			unix.Mount(tag, wire.SharedDir, "virtiofs", unix.MS_NODEV, "")); err != nil {
			return nil, fmt.Errorf("mount the shared directory: %w", err)
		}
	}
	return new(wire.Empty), nil
}

// setSysctls sets kernel parameters by their names with dots.
func setSysctls(all map[string]string) error {
	for name, value := range all {
		path := filepath.Join("/proc/sys", strings.ReplaceAll(name, ".", "/"))
		if strings.Contains(name, "/") {
			return fmt.Errorf("the kernel parameter %q: %w", name, errInvalid)
		}
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("set the kernel parameter %s: %w", name, err)
		}
	}
	return nil
}

// upLoopback sets the loopback interface up.
func upLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

// replyTime is how long the machine stays on for its last reply to be sent.
const replyTime = 200 * time.Millisecond

func (s *sandbox) Shutdown(ctx context.Context, _ *wire.ShutdownRequest) (*wire.ShutdownResponse, error) {
	ctx, cancel := whileBusy(ctx, completedRequests)
	defer cancel()
	failed := s.endAll(ctx, s.volumes.end)
	time.AfterFunc(replyTime, func() { _ = powerOff() })
	return &wire.ShutdownResponse{Errors: failed[:min(len(failed), 64)]}, nil
}

// endAll ends all containers and volumes at once, and waits for ctx at most: a device that hangs must cost the volumes of
// other devices nothing. The containers are killed first, so that all that they wrote is synced.
func (s *sandbox) endAll(ctx context.Context, endVolume func(ctx context.Context, name string) error) (failed []string) {
	calls := make(map[string]func() error)
	for id, c := range s.containers.all() {
		_ = c.cgroup.signal(unix.SIGKILL)
		calls["container "+id] = func() error { return s.containers.remove(ctx, id) }
	}
	for _, name := range s.volumes.names() {
		calls["volume "+name] = func() error { return endVolume(ctx, name) }
	}
	type end struct {
		of  string
		err error
	}
	ends := make(chan end, len(calls))
	for of, call := range calls {
		go func() { ends <- end{of, call()} }()
	}
	for len(calls) > 0 {
		select {
		case one := <-ends:
			delete(calls, one.of)
			if one.err != nil {
				failed = append(failed, wire.Text(one.of+": "+one.err.Error()))
			}
		case <-ctx.Done():
			for of := range calls {
				failed = append(failed, of+": it does not end")
			}
			return failed
		}
	}
	return failed
}

// stallTime is how long disks that write nothing are waited for: as long as they write, nothing that a container wrote shall
// be lost.
const stallTime = 30 * time.Second

// whileBusy returns a context that ends when progress has not changed for stallTime.
func whileBusy(ctx context.Context, progress func() string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		for last, since := progress(), time.Now(); time.Since(since) < stallTime && sys.Sleep(ctx, time.Second); {
			if now := progress(); now != last {
				last, since = now, time.Now()
			}
		}
	}()
	return ctx, cancel
}
