package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
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
	spec    *specs.Spec
	cgroup  cgroup
	volumes []string

	mu        sync.Mutex
	processes map[string]*process
	started   bool
}

func newContainers(v *volumes) *containers {
	return &containers{volumes: v, of: make(map[string]*container)}
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

func (cs *containers) forget(id string, c *container) {
	cs.mu.Lock()
	delete(cs.of, id)
	cs.mu.Unlock()
	for _, name := range c.volumes {
		cs.volumes.use(name, -1)
	}
}

func (cs *containers) create(ctx context.Context, req *wire.CreateContainerRequest) error {
	spec := new(specs.Spec)
	if !abi.IsSandboxID(req.GetContainer()) || json.Unmarshal(req.GetSpec(), spec) != nil || spec.Process == nil || spec.Root == nil {
		return fmt.Errorf("the container's id or spec: %w", errInvalid)
	}
	flags, err := newNamespaces(spec)
	if err != nil {
		return err
	}
	c := &container{spec: spec, cgroup: cgroup(req.GetContainer()), processes: make(map[string]*process)}
	if err := cs.reserve(req.GetContainer(), c); err != nil {
		return err
	}
	setup, err := cs.setup(c, req.GetVolumes())
	if err == nil {
		err = c.cgroup.make(spec)
	}
	if err == nil {
		err = c.run(ctx, setup, flags)
	}
	if err != nil {
		_ = cs.remove(ctx, req.GetContainer())
	}
	return err
}

// setup is what the container's process has to know.
func (cs *containers) setup(c *container, mounts []*wire.VolumeMount) (*containerSetup, error) {
	setup := &containerSetup{Spec: c.spec, Volumes: make(map[int]volumeMount)}
	for _, m := range mounts {
		if int(m.GetMount()) >= len(c.spec.Mounts) {
			return nil, fmt.Errorf("the mount %d: %w", m.GetMount(), errInvalid)
		}
		vol, err := cs.volumes.get(m.GetVolume())
		if err != nil {
			return nil, err
		}
		cs.volumes.use(m.GetVolume(), 1)
		c.volumes = append(c.volumes, m.GetVolume())
		setup.Volumes[int(m.GetMount())] = volumeMount{Path: volumePath(m.GetVolume()), Sub: m.GetSubPath(), Info: vol.info}
	}
	return setup, nil
}

// run starts the container's process and waits until it has made its mounts.
func (c *container) run(ctx context.Context, setup *containerSetup, flags uintptr) error {
	p, err := newProcess(wordContainer, c.spec.Process.Terminal)
	if err != nil {
		return err
	}
	c.processes[""] = p
	if err := c.cgroup.start(func(attr *syscall.SysProcAttr) error {
		attr.Cloneflags = flags
		return p.start(attr)
	}); err != nil {
		return err
	}
	return p.prepare(ctx, setup)
}

// start lets the container's process become the workload.
func (cs *containers) start(ctx context.Context, id string) error {
	c, err := cs.get(id)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started || c.processes[""] == nil {
		return fmt.Errorf("the container is started: %w", errState)
	}
	c.started = true
	p := c.processes[""]
	return p.execute(ctx, p.pid())
}

// exec runs a further process.
func (cs *containers) exec(ctx context.Context, req *wire.ExecProcessRequest) error {
	c, err := cs.get(req.GetProcess().GetContainer())
	if err != nil {
		return err
	}
	spec := new(specs.Process)
	name := req.GetProcess().GetExec()
	if name == "" || json.Unmarshal(req.GetSpec(), spec) != nil {
		return fmt.Errorf("the process: %w", errInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.processes[name] != nil:
		return fmt.Errorf("process: %w", errExists)
	case !c.started || c.processes[""].ended():
		return fmt.Errorf("the container does not run: %w", errState)
	}
	p, err := newProcess(wordExec, spec.Terminal)
	if err != nil {
		return err
	}
	first := c.processes[""].pid()
	err = c.cgroup.start(func(attr *syscall.SysProcAttr) error { return startIn(first, func() error { return p.start(attr) }) })
	if err == nil {
		err = p.prepare(ctx, &execSetup{Process: spec, PID: first})
	}
	if err == nil {
		err = p.execute(ctx, first)
	}
	if err != nil {
		p.end(ctx)
		return err
	}
	c.processes[name] = p
	return nil
}

// startIn calls f in a thread whose children are in the process namespace of another
// process. The thread ends with it.
func startIn(pid int, f func() error) error {
	return onThread(func() error {
		ns, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/pid", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(ns) }()
		if err := unix.Setns(ns, unix.CLONE_NEWPID); err != nil {
			return err
		}
		return f()
	})
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

func (cs *containers) signal(req *wire.SignalProcessRequest) error {
	c, p, err := cs.process(req.GetProcess())
	if err != nil {
		return err
	}
	signal := syscall.Signal(req.GetSignal())
	if req.GetAll() {
		return c.cgroup.signal(signal)
	}
	return p.signal(signal)
}

func (cs *containers) wait(ctx context.Context, of *wire.Process) (*wire.WaitProcessResponse, error) {
	c, p, err := cs.process(of)
	if err != nil {
		return nil, err
	}
	code, err := p.wait(ctx)
	return &wire.WaitProcessResponse{ExitCode: code, OomKilled: c.cgroup.oomKilled()}, err
}

// forgetProcess ends a process of exec.
func (cs *containers) forgetProcess(ctx context.Context, of *wire.Process) error {
	c, p, err := cs.process(of)
	if errors.Is(err, errUnknown) {
		return nil
	}
	if err != nil || of.GetExec() == "" {
		return fmt.Errorf("the container's own process: %w", errors.Join(err, errInvalid))
	}
	p.end(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.processes, of.GetExec())
	return nil
}

func (cs *containers) remove(ctx context.Context, id string) error {
	c, err := cs.get(id)
	if errors.Is(err, errUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	c.end(ctx)
	if err := c.cgroup.remove(ctx); err != nil {
		return err
	}
	cs.forget(id, c)
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

// newNamespaces tells which namespaces a container gets. Those that have a path are the
// pod's, which are the machine's.
func newNamespaces(spec *specs.Spec) (uintptr, error) {
	flags := uintptr(unix.CLONE_NEWNS | unix.CLONE_NEWPID)
	if spec.Linux == nil {
		return flags, nil
	}
	if spec.Hooks != nil && (len(spec.Hooks.CreateContainer) > 0 || len(spec.Hooks.StartContainer) > 0) {
		return 0, unsupported("hooks")
	}
	for _, ns := range spec.Linux.Namespaces {
		switch {
		case ns.Type == specs.UserNamespace:
			return 0, unsupported("a user namespace")
		case ns.Type == specs.TimeNamespace:
			return 0, unsupported("a time namespace")
		case ns.Type == specs.PIDNamespace && ns.Path != "":
			return 0, unsupported("another container's processes (shareProcessNamespace, hostPID)")
		case ns.Path != "":
		case ns.Type == specs.IPCNamespace:
			flags |= unix.CLONE_NEWIPC
		case ns.Type == specs.UTSNamespace:
			flags |= unix.CLONE_NEWUTS
		case ns.Type == specs.NetworkNamespace:
			flags |= unix.CLONE_NEWNET
		}
	}
	return flags, nil
}
