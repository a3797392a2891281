package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

// containers are those of the sandbox.
type containers struct {
	volumes *volumes

	mu sync.Mutex
	of map[string]*container
}

// container is one of them. Its first process has the name "".
type container struct {
	cgroup  cgroup
	volumes []*guestVolume
	mounts  int // its mount namespace, held while it is there

	mu        sync.Mutex
	processes map[string]*process
	started   bool
}

func (cs *containers) get(id string) (*container, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c := cs.of[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("container: %w", errUnknown)
}

// reserve takes the id for a container that is being created.
func (cs *containers) reserve(id string, c *container) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.of[id] != nil {
		return fmt.Errorf("container: %w", errExists)
	}
	cs.of[id] = c
	return nil
}

func (cs *containers) CreateContainer(ctx context.Context, req *wire.CreateContainerRequest) (*wire.Empty, error) {
	spec, id := new(specs.Spec), req.GetContainer()
	if !abi.IsSandboxID(id) || json.Unmarshal(req.GetSpec(), spec) != nil || spec.Process == nil || spec.Root == nil {
		return nil, fmt.Errorf("the container's id or spec: %w", errInvalid)
	}
	flags, err := newNamespaces(spec)
	if err != nil {
		return nil, err
	}
	c := &container{cgroup: cgroup(id), mounts: -1, processes: make(map[string]*process)}
	if err := cs.reserve(id, c); err != nil {
		return nil, err
	}
	is := &setup{Process: spec.Process, Spec: spec, Namespaces: flags}
	is.Volumes, err = cs.use(c, req.GetVolumes(), len(spec.Mounts))
	if err == nil && req.GetImage() != "" {
		is.Image, err = cs.useImage(c, req.GetImage())
	}
	if err == nil {
		err = c.cgroup.make(spec)
	}
	if err == nil {
		_, err = c.begin(ctx, "", is)
	}
	if err == nil {
		c.mounts, err = openNamespace(c.processes[""].pid(), "mnt")
	}
	if err != nil {
		_ = cs.remove(context.WithoutCancel(ctx), id)
	}
	return new(wire.Empty), err
}

// use makes volumes those of a container, and gives them by their mounts.
func (cs *containers) use(c *container, asked []*wire.VolumeMount, mounts int) (map[int]*volumeMount, error) {
	all := make(map[int]*volumeMount)
	for _, m := range asked {
		if int(m.GetMount()) >= mounts {
			return nil, fmt.Errorf("the mount %d: %w", m.GetMount(), errInvalid)
		}
		vol, err := cs.volumes.get(m.GetVolume())
		if err != nil {
			return nil, err
		}
		vol.users.Add(1)
		c.volumes = append(c.volumes, vol)
		all[int(m.GetMount())] = &volumeMount{Path: volumePath(m.GetVolume()), Sub: m.GetSubPath(), Info: vol.info}
	}
	return all, nil
}

// useImage makes a volume what a container has its root filesystem in, and gives its place.
func (cs *containers) useImage(c *container, name string) (string, error) {
	vol, err := cs.volumes.get(name)
	if err != nil {
		return "", err
	}
	vol.users.Add(1)
	c.volumes = append(c.volumes, vol)
	return volumePath(name), initramfs.Load("overlay")
}

// begin starts a process of the container and waits until it is set up.
func (c *container) begin(ctx context.Context, name string, is *setup) (*process, error) {
	p, err := newProcess(is.Process.Terminal)
	if err != nil {
		return nil, err
	}
	c.processes[name] = p
	group, err := sys.OpenDir(c.cgroup.file(""))
	if err != nil {
		return p, err
	}
	defer sys.CloseFD(group)
	attr := &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: group, Cloneflags: is.Namespaces &^ unix.CLONE_NEWCGROUP}
	if is.Join == 0 {
		err = p.start(attr)
	} else {
		err = beside(is.Join, func() error { return p.start(attr) })
	}
	if err != nil {
		return p, err
	}
	said, err := p.ask(ctx, is)
	if err == nil && !said.SetupDone {
		err = errors.New("the process has ended while it was set up")
	}
	return p, err
}

func openNamespace(pid int, name string) (int, error) {
	return unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// beside calls f in a thread whose children are in the process namespace of another
// process. The thread ends with it.
func beside(pid int, f func() error) error {
	ns, err := openNamespace(pid, "pid")
	if err != nil {
		return err
	}
	defer sys.CloseFD(ns)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(ns, unix.CLONE_NEWPID); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func (cs *containers) StartContainer(ctx context.Context, req *wire.StartContainerRequest) (*wire.Empty, error) {
	c, err := cs.get(req.GetContainer())
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.processes[""]
	if c.started || p == nil {
		return nil, fmt.Errorf("the container is started: %w", errState)
	}
	c.started = true
	return new(wire.Empty), p.execute(ctx, p.pid())
}

func (cs *containers) ExecProcess(ctx context.Context, req *wire.ExecProcessRequest) (*wire.Empty, error) {
	c, err := cs.get(req.GetProcess().GetContainer())
	if err != nil {
		return nil, err
	}
	spec, name := new(specs.Process), req.GetProcess().GetExec()
	if name == "" || json.Unmarshal(req.GetSpec(), spec) != nil {
		return nil, fmt.Errorf("the process: %w", errInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.processes[name] != nil:
		return nil, fmt.Errorf("process: %w", errExists)
	case !c.started || c.processes[""].ended():
		return nil, fmt.Errorf("the container does not run: %w", errState)
	}
	first := c.processes[""].pid()
	p, err := c.begin(ctx, name, &setup{Process: spec, Join: first})
	if err == nil {
		err = p.execute(ctx, first)
	}
	if err != nil && p != nil {
		p.end(ctx)
		delete(c.processes, name)
	}
	return new(wire.Empty), err
}

// process finds a process.
func (cs *containers) process(of *wire.Process) (*container, *process, error) {
	c, err := cs.get(of.GetContainer())
	if err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.processes[of.GetExec()]; p != nil {
		return c, p, nil
	}
	return nil, nil, fmt.Errorf("process: %w", errUnknown)
}

func (cs *containers) SignalProcess(_ context.Context, req *wire.SignalProcessRequest) (*wire.Empty, error) {
	c, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	send := p.signal
	if req.GetAll() {
		send = c.cgroup.signal
	}
	return new(wire.Empty), send(syscall.Signal(req.GetSignal()))
}

func (cs *containers) WaitProcess(ctx context.Context, req *wire.WaitProcessRequest) (*wire.WaitProcessResponse, error) {
	c, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	code, err := p.wait(ctx)
	return &wire.WaitProcessResponse{ExitCode: code, OomKilled: c.cgroup.oomKilled()}, err
}

func (cs *containers) DeleteProcess(ctx context.Context, req *wire.DeleteProcessRequest) (*wire.Empty, error) {
	id, name := req.GetProcess().GetContainer(), req.GetProcess().GetExec()
	if name == "" {
		return new(wire.Empty), cs.remove(ctx, id)
	}
	if c, p, err := cs.process(req.GetProcess()); err == nil {
		p.end(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.processes, name)
	}
	return new(wire.Empty), nil
}

func (cs *containers) ReadOutput(ctx context.Context, req *wire.ReadOutputRequest) (*wire.ReadOutputResponse, error) {
	_, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	data, err := p.read(ctx, req)
	return &wire.ReadOutputResponse{Data: data}, err
}

func (cs *containers) WriteInput(ctx context.Context, req *wire.WriteInputRequest) (*wire.WriteInputResponse, error) {
	_, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	n, err := p.write(ctx, req.GetData())
	return &wire.WriteInputResponse{Written: uint32(n)}, err //nolint:gosec // at most what was sent
}

func (cs *containers) ResizeTerminal(_ context.Context, req *wire.ResizeTerminalRequest) (*wire.Empty, error) {
	_, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	return new(wire.Empty), p.resize(req.GetColumns(), req.GetRows())
}

func (cs *containers) remove(ctx context.Context, id string) error {
	c, err := cs.get(id)
	if err != nil {
		return nil // there is none
	}
	c.end(ctx)
	if err := c.cgroup.remove(ctx); err != nil {
		return err
	}
	if err := c.unmount(); err != nil {
		return err
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.of, id)
	for _, vol := range c.volumes {
		vol.users.Add(-1)
	}
	return nil
}

// unmount lets go of the container's mounts. What the host shares must not be read any more
// then: a virtiofs of Linux 6.1 that is unmounted while a file is read ahead for a process
// that was killed ends in a kernel bug. The server answers in turn, so that after its first
// answer all is read, and after its second one all is closed.
func (c *container) unmount() error {
	var fs unix.Statfs_t
	for range 2 {
		if err := unix.Statfs(wire.SharedDir, &fs); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("what the host shares is not answered for: %w", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	sys.CloseFD(c.mounts)
	c.mounts = -1
	return nil
}

// removeAll ends all containers.
func (cs *containers) removeAll(ctx context.Context) {
	cs.mu.Lock()
	ids := slices.Collect(maps.Keys(cs.of))
	cs.mu.Unlock()
	for _, id := range ids {
		_ = cs.remove(ctx, id)
	}
}

// end kills all that is left of a container and waits for it.
func (c *container) end(ctx context.Context) {
	_ = c.cgroup.signal(unix.SIGKILL)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.processes {
		p.end(ctx)
	}
}

// namespaces are those that a container can have of its own.
var namespaces = map[specs.LinuxNamespaceType]uintptr{
	specs.MountNamespace: unix.CLONE_NEWNS, specs.PIDNamespace: unix.CLONE_NEWPID, specs.IPCNamespace: unix.CLONE_NEWIPC,
	specs.UTSNamespace: unix.CLONE_NEWUTS, specs.NetworkNamespace: unix.CLONE_NEWNET, specs.CgroupNamespace: unix.CLONE_NEWCGROUP,
}

// newNamespaces tells which namespaces a container gets. Those that have a path are the
// pod's, which are the machine's.
func newNamespaces(spec *specs.Spec) (uintptr, error) {
	flags := uintptr(unix.CLONE_NEWNS | unix.CLONE_NEWPID)
	if spec.Linux == nil {
		return flags, nil
	}
	for _, ns := range spec.Linux.Namespaces {
		flag, known := namespaces[ns.Type]
		switch {
		case !known:
			return 0, unsupported("a " + string(ns.Type) + " namespace")
		case ns.Type == specs.PIDNamespace && ns.Path != "":
			return 0, unsupported("another container's processes (shareProcessNamespace, hostPID)")
		case ns.Path == "":
			flags |= flag
		}
	}
	return flags, nil
}
