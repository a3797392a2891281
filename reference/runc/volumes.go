package runc

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/cgroup"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// Volumes is what can be asked about the volumes that sandboxes have.
//
// Nothing is remembered between two questions, also in the agent: finding the sandbox
// takes about a twentieth of the time of an answer.
type Volumes struct{ cfg Config }

// OpenVolumes gives those of this node, by its configuration.
func OpenVolumes(cfg Config) Volumes { return Volumes{cfg: cfg} }

// ask opens the filesystem of a volume in its live sandbox for f.
func (v Volumes) ask(target string, f func(holder, abi.Info) error) error {
	at, info, err := v.open(abi.DirName(target))
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	defer func() { _ = unix.Close(at.root) }()
	if err := f(at, info); err != nil {
		return fmt.Errorf("volume %s: sandbox %s: %w", target, at.sandbox, err)
	}
	return nil
}

// open finds the live sandbox that has a volume, and opens its filesystem there.
func (v Volumes) open(volume string) (holder, abi.Info, error) {
	dir, err := abi.Open(v.cfg.Root, volume)
	if errors.Is(err, fs.ErrNotExist) {
		return holder{}, abi.Info{}, fmt.Errorf("%w: it is not published to this runtime", handler.ErrNoSandbox)
	}
	if err != nil {
		return holder{}, abi.Info{}, err
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Info()
	if err != nil {
		return holder{}, abi.Info{}, err
	}
	at, err := findHolder(dir, info)
	return at, info, err
}

// Stats measures the filesystem now.
func (v Volumes) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	err = v.ask(target, func(at holder, info abi.Info) (err error) {
		sandbox = at.sandbox
		reply, err = v.freezer().Stat(abi.DirName(target), at.root, info.ReadOnly())
		return err
	})
	return reply, sandbox, err
}

// Resize makes the filesystem as large as its device.
func (v Volumes) Resize(target string, least, most int64) (size int64, err error) {
	err = v.ask(target, func(at holder, info abi.Info) error {
		if info.ReadOnly() {
			return fmt.Errorf("%w: the volume is read-only", fsops.ErrUnsupported)
		}
		device, err := handler.OpenDevice(info)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(device) }()
		size, err = fsops.Grow(at.root, device, least, most)
		return err
	})
	return size, err
}

// Any tells whether any sandbox of the node has a volume.
func (v Volumes) Any() bool {
	entries, err := os.ReadDir(v.cfg.Root)
	if err != nil {
		return false
	}
	for _, entry := range entries {
		if !abi.IsDirName(entry.Name()) {
			continue
		}
		if at, _, err := v.open(entry.Name()); err == nil {
			_ = unix.Close(at.root)
			return true
		}
	}
	return false
}

// commandWatch is how this program starts itself to thaw what was frozen and
// forgotten.
const commandWatch = "watch-frozen"

func (v Volumes) freezer() fsops.Freezer {
	return fsops.Freezer{
		Dir: filepath.Join(v.cfg.StateDir, "frozen"), Watchdog: []string{"/proc/self/exe", abi.Word, commandWatch}, ControlGroup: controlGroup,
	}
}

// Freeze holds all writes until Thaw, or until the time is over.
func (v Volumes) Freeze(target string, timeout time.Duration) error {
	return v.ask(target, func(at holder, _ abi.Info) error {
		return v.freezer().Freeze(abi.DirName(target), at.root, timeout)
	})
}

// Thaw lets writes go on. It needs no live sandbox: one that died frozen must be
// able to go.
func (v Volumes) Thaw(target string) error {
	volume, root := abi.DirName(target), -1
	if at, _, err := v.open(volume); err == nil {
		defer func() { _ = unix.Close(at.root) }()
		root = at.root
	}
	err := v.freezer().Thaw(volume, root)
	if errors.Is(err, fsops.ErrNotFrozen) {
		err = fmt.Errorf("%w: what was read of its device meanwhile may be of different times", err)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	return nil
}

// ThawExpired thaws volumes that are frozen although their time is over.
func (v Volumes) ThawExpired() abi.ThawExpiredReply {
	volumes, next, err := v.freezer().ThawExpired()
	reply := abi.ThawExpiredReply{Thawed: volumes, NextSeconds: int64((next + time.Second - 1) / time.Second)}
	if err != nil {
		reply.Problem = err.Error()
	}
	return reply
}

// controlGroup is that of the agent and of the watchdogs of frozen volumes. They serve
// all pods of the node: they must not end, or be stopped, with the control group of
// the pod whose container happened to start them.
const controlGroup = "crust-runc"

// startAgent starts an agent where none answers. It is not waited for: the broker
// runs the program until the agent serves. An agent that could not be isolated when it
// was started, or is of an older version, is now.
func startAgent(cfg Config) error {
	conn, err := net.DialTimeout("unix", cfg.AgentSocket(), time.Second)
	if err == nil {
		defer func() { _ = conn.Close() }()
		agent, err := sys.Peer(conn)
		if err != nil {
			return err
		}
		return isolateAgent(int(agent.Pid))
	}
	cmd := exec.Command(cfg.AgentProgram) //nolint:gosec // by our own configuration
	cmd.Dir = "/"
	cmd.Env = childEnvironment()
	// Neither the container's streams nor its console may be kept open by it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		// The program answers as well; it takes longer.
		return fmt.Errorf("no agent could be started: %w", err)
	}
	return errors.Join(isolateAgent(cmd.Process.Pid), cmd.Process.Release())
}

func isolateAgent(pid int) error {
	if err := cgroup.Move(pid, controlGroup); err != nil {
		return fmt.Errorf("the agent has no control group of its own, and may end with a pod's: volumes that are frozen then "+
			"are thawed by crust-proxy when their time is over: %w", err)
	}
	return nil
}

// childEnvironment is what our own processes need to find the same configuration.
func childEnvironment() []string {
	env := []string{"PATH=" + os.Getenv("PATH")}
	if file := os.Getenv(configVariable); file != "" {
		env = append(env, configVariable+"="+file)
	}
	return env
}
