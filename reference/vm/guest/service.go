package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// service answers the host.
type service struct {
	volumes    *volumes
	containers *containers
}

// agent is the second process of the machine.
func agent() error {
	// Where memory is short, the agent is to stay.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		return err
	}
	s := &service{volumes: newVolumes()}
	s.containers = newContainers(s.volumes)
	return serve(context.Background(), s)
}

func (s *service) Describe(context.Context, *wire.DescribeRequest) (*wire.DescribeResponse, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, err
	}
	names, _, err := initramfs.List()
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return name == initramfs.Boot })
	return &wire.DescribeResponse{Protocol: wire.Protocol, Kernel: unix.ByteSliceToString(name.Release[:]), Filesystems: names}, nil
}

func (s *service) StartSandbox(_ context.Context, req *wire.StartSandboxRequest) (*wire.StartSandboxResponse, error) {
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
	return &wire.StartSandboxResponse{}, nil
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

func (s *service) Ping(context.Context, *wire.PingRequest) (*wire.PingResponse, error) {
	return &wire.PingResponse{}, nil
}

// answerTime is how long the machine lives on after its last answer.
const answerTime = 200 * time.Millisecond

func (s *service) Shutdown(ctx context.Context, _ *wire.ShutdownRequest) (*wire.ShutdownResponse, error) {
	// Who waits to write to a frozen filesystem cannot be killed.
	s.volumes.thawAll()
	s.containers.removeAll(ctx)
	problems := s.volumes.removeAll(ctx)
	time.AfterFunc(answerTime, func() { _ = powerOff() })
	return &wire.ShutdownResponse{Errors: problems}, nil
}

func (s *service) AddVolume(ctx context.Context, req *wire.AddVolumeRequest) (*wire.AddVolumeResponse, error) {
	return s.volumes.add(ctx, req)
}

func (s *service) RemoveVolume(ctx context.Context, req *wire.RemoveVolumeRequest) (*wire.RemoveVolumeResponse, error) {
	return &wire.RemoveVolumeResponse{}, s.volumes.remove(ctx, req.GetVolume())
}

func (s *service) GetVolumeStats(_ context.Context, req *wire.GetVolumeStatsRequest) (*wire.GetVolumeStatsResponse, error) {
	return s.volumes.stats(req.GetVolume())
}

func (s *service) ResizeVolume(ctx context.Context, req *wire.ResizeVolumeRequest) (*wire.ResizeVolumeResponse, error) {
	size, err := s.volumes.resize(ctx, req)
	return &wire.ResizeVolumeResponse{CapacityBytes: size}, err
}

func (s *service) FreezeVolume(_ context.Context, req *wire.FreezeVolumeRequest) (*wire.FreezeVolumeResponse, error) {
	timeout := time.Duration(req.GetTimeoutMillis()) * time.Millisecond
	return &wire.FreezeVolumeResponse{}, s.volumes.freeze(req.GetVolume(), timeout)
}

func (s *service) ThawVolume(_ context.Context, req *wire.ThawVolumeRequest) (*wire.ThawVolumeResponse, error) {
	return &wire.ThawVolumeResponse{}, s.volumes.thaw(req.GetVolume())
}

func (s *service) CreateContainer(ctx context.Context, req *wire.CreateContainerRequest) (*wire.CreateContainerResponse, error) {
	return &wire.CreateContainerResponse{}, s.containers.create(ctx, req)
}

func (s *service) StartContainer(ctx context.Context, req *wire.StartContainerRequest) (*wire.StartContainerResponse, error) {
	return &wire.StartContainerResponse{}, s.containers.start(ctx, req.GetContainer())
}

func (s *service) DeleteContainer(ctx context.Context, req *wire.DeleteContainerRequest) (*wire.DeleteContainerResponse, error) {
	return &wire.DeleteContainerResponse{}, s.containers.remove(ctx, req.GetContainer())
}

func (s *service) ExecProcess(ctx context.Context, req *wire.ExecProcessRequest) (*wire.ExecProcessResponse, error) {
	return &wire.ExecProcessResponse{}, s.containers.exec(ctx, req)
}

func (s *service) SignalProcess(_ context.Context, req *wire.SignalProcessRequest) (*wire.SignalProcessResponse, error) {
	return &wire.SignalProcessResponse{}, s.containers.signal(req)
}

func (s *service) WaitProcess(ctx context.Context, req *wire.WaitProcessRequest) (*wire.WaitProcessResponse, error) {
	return s.containers.wait(ctx, req.GetProcess())
}

func (s *service) ForgetProcess(ctx context.Context, req *wire.ForgetProcessRequest) (*wire.ForgetProcessResponse, error) {
	return &wire.ForgetProcessResponse{}, s.containers.forgetProcess(ctx, req.GetProcess())
}

func (s *service) ReadOutput(ctx context.Context, req *wire.ReadOutputRequest) (*wire.ReadOutputResponse, error) {
	_, p, err := s.containers.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	data, err := p.read(ctx, req)
	return &wire.ReadOutputResponse{Data: data}, err
}

func (s *service) WriteInput(ctx context.Context, req *wire.WriteInputRequest) (*wire.WriteInputResponse, error) {
	_, p, err := s.containers.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	n, err := p.write(ctx, req.GetData())
	return &wire.WriteInputResponse{Written: uint32(n)}, err //nolint:gosec // at most what was sent
}

func (s *service) CloseInput(_ context.Context, req *wire.CloseInputRequest) (*wire.CloseInputResponse, error) {
	_, p, err := s.containers.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	return &wire.CloseInputResponse{}, p.closeInput()
}

func (s *service) ResizeTerminal(_ context.Context, req *wire.ResizeTerminalRequest) (*wire.ResizeTerminalResponse, error) {
	_, p, err := s.containers.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	return &wire.ResizeTerminalResponse{}, p.resize(req.GetColumns(), req.GetRows())
}
