package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
)

type containers struct {
	volumes *volumes

	mu   sync.Mutex
	byID map[string]*container
}

// container is one of them. Its own process has the name "".
type container struct {
	cgroup  cgroup
	volumes []*guestVolume
	mountNS int // a descriptor of its mount namespace, which keeps it alive

	mu        sync.Mutex
	processes map[string]*process
	started   bool
}

func (cs *containers) get(id string) (*container, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c := cs.byID[id]; c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("container: %w", errNotFound)
}

// reserve registers a container that is being created.
func (cs *containers) reserve(id string, c *container) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.byID[id] != nil {
		return fmt.Errorf("container: %w", errExists)
	}
	cs.byID[id] = c
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
	c := &container{cgroup: cgroup(id), mountNS: -1, processes: make(map[string]*process)}
	if err := cs.create(ctx, id, c, &setup{Process: spec.Process, Spec: spec, Namespaces: flags}, req.GetVolumes()); err != nil {
		if !errors.Is(err, errExists) {
			_ = cs.remove(context.WithoutCancel(ctx), id)
		}
		return nil, err
	}
	return new(wire.Empty), nil
}

// create holds the container's lock: once it is reserved, Shutdown may remove it, and waits until it is complete.
func (cs *containers) create(ctx context.Context, id string, c *container, s *setup, requested []*wire.VolumeMount) (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := cs.reserve(id, c); err != nil {
		return err
	}
	if s.Volumes, err = cs.useVolumes(c, requested, len(s.Spec.Mounts)); err != nil {
		return err
	}
	if err := c.cgroup.create(s.Spec); err != nil {
		return err
	}
	p, err := c.startProcess(ctx, "", s)
	if err == nil {
		c.mountNS, err = openNamespace(p.pid(), "mnt")
	}
	return err
}

// useVolumes counts the container as a user of its volumes, and returns them by the index of their mount.
func (cs *containers) useVolumes(c *container, requested []*wire.VolumeMount, mounts int) (map[int]*volumeMount, error) {
	all := make(map[int]*volumeMount)
	for _, m := range requested {
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

// startProcess starts a process of the container and waits until it is set up.
func (c *container) startProcess(ctx context.Context, name string, s *setup) (*process, error) {
	p, err := newProcess(s.Process.Terminal)
	if err != nil {
		return nil, err
	}
	c.processes[name] = p
	group, err := sys.OpenDir(c.cgroup.file(""))
	if err != nil {
		return p, err
	}
	defer sys.CloseFD(group)
	attr := &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: group, Cloneflags: s.Namespaces &^ unix.CLONE_NEWCGROUP}
	if s.Join == 0 {
		err = p.start(attr)
	} else {
		err = inPIDNamespaceOf(s.Join, func() error { return p.start(attr) })
	}
	if err != nil {
		return p, err
	}
	r, err := p.send(ctx, s)
	if err == nil && !r.SetupDone {
		err = errors.New("the process has ended while it was set up")
	}
	return p, err
}

func openNamespace(pid int, name string) (int, error) {
	return unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// inPIDNamespaceOf calls f in a thread whose children are in the PID namespace of another
// process. The thread ends with the call.
func inPIDNamespaceOf(pid int, f func() error) error {
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
	own := c.processes[""].pid()
	p, err := c.startProcess(ctx, name, &setup{Process: spec, Join: own})
	if err == nil {
		err = p.execute(ctx, own)
	}
	if err != nil && p != nil {
		p.end(ctx)
		delete(c.processes, name)
	}
	return new(wire.Empty), err
}

// process looks up a process.
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
	return nil, nil, fmt.Errorf("process: %w", errNotFound)
}

func (cs *containers) SignalProcess(_ context.Context, req *wire.SignalProcessRequest) (*wire.Empty, error) {
	c, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	signal := p.signal
	if req.GetAll() {
		signal = c.cgroup.signal
	}
	return new(wire.Empty), signal(syscall.Signal(req.GetSignal()))
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

func (cs *containers) ResizeTerminal(ctx context.Context, req *wire.ResizeTerminalRequest) (*wire.Empty, error) {
	_, p, err := cs.process(req.GetProcess())
	if err != nil {
		return nil, err
	}
	return new(wire.Empty), p.resize(ctx, req.GetColumns(), req.GetRows())
}

func (cs *containers) remove(ctx context.Context, id string) error {
	c, err := cs.get(id)
	if err != nil {
		return nil // it does not exist
	}
	c.kill(ctx)
	if err := c.cgroup.remove(ctx); err != nil {
		return err
	}
	if err := c.releaseMounts(); err != nil {
		return err
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.byID[id] != c {
		return nil // another call has removed it meanwhile
	}
	delete(cs.byID, id)
	for _, vol := range c.volumes {
		vol.users.Add(-1)
	}
	return nil
}

// releaseMounts releases the mount namespace, and with it the container's mounts. The virtiofs of Linux 6.1 crashes if
// it is unmounted while it still reads ahead for a killed process. virtiofsd serves requests in order: after its first
// reply all reads are done, after the second all files are closed.
func (c *container) releaseMounts() error {
	var fs unix.Statfs_t
	for range 2 {
		if err := unix.Statfs(wire.SharedDir, &fs); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("virtiofsd does not answer: %w", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	sys.CloseFD(c.mountNS)
	c.mountNS = -1
	return nil
}

func (cs *containers) all() map[string]*container {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return maps.Clone(cs.byID)
}

// kill kills all processes of a container and waits for their end.
func (c *container) kill(ctx context.Context) {
	_ = c.cgroup.signal(unix.SIGKILL)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.processes {
		p.end(ctx)
	}
}

// namespaces are the kinds of namespaces that a container need not share.
var namespaces = map[specs.LinuxNamespaceType]uintptr{
	specs.MountNamespace: unix.CLONE_NEWNS, specs.PIDNamespace: unix.CLONE_NEWPID, specs.IPCNamespace: unix.CLONE_NEWIPC,
	specs.UTSNamespace: unix.CLONE_NEWUTS, specs.NetworkNamespace: unix.CLONE_NEWNET, specs.CgroupNamespace: unix.CLONE_NEWCGROUP,
}

// newNamespaces returns the flags of the namespaces to create. A namespace with a path is the
// pod's, which is the machine's.
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
