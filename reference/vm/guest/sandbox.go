package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// sandbox is the machine as a whole.
type sandbox struct {
	volumes    *volumes
	containers *containers
}

// agent is the second process of the machine. It answers the host.
func agent() error {
	// Where memory is short, the agent is to stay.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		return err
	}
	v := newVolumes()
	c := &containers{volumes: v, of: make(map[string]*container)}
	port := &ports{name: wire.Port, free: make(chan struct{}, 1)}
	port.free <- struct{}{}
	return wire.Agent{Sandbox: &sandbox{volumes: v, containers: c}, Volumes: v, Containers: c, CodeOf: codeOf}.Serve(context.Background(), port)
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
		err := errors.Join(os.MkdirAll(wire.SharedDir, 0o755), unix.Mount(tag, wire.SharedDir, "virtiofs", unix.MS_NODEV, "")) //nolint:gosec // as roots are
		if err != nil {
			return nil, fmt.Errorf("mount what the host shares: %w", err)
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

// upLoopback turns the loopback interface on.
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

// answerTime is how long the machine lives on after its last answer.
const answerTime = 200 * time.Millisecond

func (s *sandbox) Shutdown(ctx context.Context, _ *wire.ShutdownRequest) (*wire.ShutdownResponse, error) {
	volumes := s.volumes.names()
	for _, name := range volumes {
		// Who waits to write to a frozen filesystem cannot be killed. Most are not frozen.
		_ = freezer().Thaw(name, -1)
	}
	s.containers.removeAll(ctx)
	answer := new(wire.ShutdownResponse)
	for _, name := range volumes {
		if err := s.volumes.remove(ctx, name); err != nil && len(answer.Errors) < 64 {
			answer.Errors = append(answer.Errors, wire.Text("volume "+name+": "+err.Error()))
		}
	}
	time.AfterFunc(answerTime, func() { _ = powerOff() })
	return answer, nil
}
