package runc

import (
	"context"
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

// Volumes implements handler.Volumes. Nothing is cached between two calls, not even in the agent: finding the sandbox
// takes about a twentieth of the time of a call.
type Volumes struct{ cfg Config }

// OpenVolumes returns the volumes of this node.
func OpenVolumes(cfg Config) Volumes { return Volumes{cfg: cfg} }

// ask calls f with the filesystem of a volume in its live sandbox.
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

// Any reports whether any sandbox of the node has a volume.
func (v Volumes) Any() bool {
	entries, _ := os.ReadDir(v.cfg.Root)
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

// commandWatch is the command with which this program starts itself as a watchdog of a freeze.
const commandWatch = "watch-frozen"

func (v Volumes) freezer() fsops.Freezer {
	return fsops.Freezer{
		Dir: filepath.Join(v.cfg.StateDir, "frozen"), Watchdog: []string{"/proc/self/exe", abi.Word, commandWatch}, ControlGroup: controlGroup,
	}
}

// Freeze blocks all writes until Thaw, or until the timeout.
func (v Volumes) Freeze(target string, timeout time.Duration) error {
	return v.ask(target, func(at holder, _ abi.Info) error { return v.freezer().Freeze(abi.DirName(target), at.root, timeout) })
}

// Thaw ends a freeze. It needs no live sandbox: one that was killed while frozen must be able to end.
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

// controlGroup is the control group of the agent and of the watchdogs of frozen volumes. They
// serve all pods: they must not be killed or frozen with the pod whose container started them.
const controlGroup = "crust-runc"

// startAgent starts an agent if none is running. It does not wait for it: the broker runs the
// program until the agent serves. A running agent that is not yet isolated is isolated; one that hangs is killed.
func startAgent(cfg Config) error {
	was, _ := os.Lstat(cfg.AgentSocket())
	conn, err := net.DialTimeout("unix", cfg.AgentSocket(), time.Second)
	if err == nil {
		defer func() { _ = conn.Close() }()
		peer, err := sys.Peer(conn)
		if err != nil || peer.Pid <= 1 { // it is in another PID namespace, or systemd listens for it
			return err
		}
		agent, _ := os.FindProcess(int(peer.Pid)) // by a pidfd: while it is asked, it cannot become another process
		// A server of gRPC writes first, at once. The kernel alone accepts for one that is stopped.
		if !isSilent(conn) {
			return isolateAgent(agent.Pid)
		}
		_ = agent.Kill()
		if isSilent(conn) { // a thread of it hangs in the kernel: another agent would find it serving
			removeSocket(cfg, was)
		}
	}
	cmd := exec.Command(cfg.AgentProgram) //nolint:gosec // by our own configuration
	cmd.Dir, cmd.Env = "/", []string{"PATH=" + os.Getenv("PATH")}
	if file := os.Getenv(configVariable); file != "" {
		cmd.Env = append(cmd.Env, configVariable+"="+file)
	}
	// It must not keep the container's streams or console open.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil { // not fatal: the broker then runs the program, which takes longer
		return fmt.Errorf("no agent could be started: %w", err)
	}
	return errors.Join(isolateAgent(cmd.Process.Pid), cmd.Process.Release())
}

// isSilent reports whether the other end neither writes nor ends within five seconds, which a busy node may take.
func isSilent(conn net.Conn) bool {
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err := conn.Read(make([]byte, 1))
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// removeSocket removes the socket that an agent had, unless it is another's by now. The lock is that of peercred.Listen.
func removeSocket(cfg Config, was os.FileInfo) {
	if dir, err := os.Open(cfg.StateDir); err == nil {
		locked := sys.Lock(context.Background(), int(dir.Fd()), time.Second) == nil
		if is, _ := os.Lstat(cfg.AgentSocket()); locked && os.SameFile(was, is) {
			_ = os.Remove(cfg.AgentSocket())
		}
		_ = dir.Close()
	}
}

func isolateAgent(pid int) error {
	if err := cgroup.Move(pid, controlGroup); err != nil {
		return fmt.Errorf("the agent has no control group of its own, and may end with a pod's: volumes that are frozen then "+
			"are thawed by crust-proxy when their time is over: %w", err)
	}
	return nil
}
