package runc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// Volumes is what can be asked about the volumes that sandboxes have.
type Volumes struct {
	cfg Config
	// memory is nil in a program that answers one question.
	memory *memory
}

// OpenVolumes gives those of this node, by its configuration, for a process that
// is asked again and again.
func OpenVolumes(cfg Config) Volumes {
	return Volumes{cfg: cfg, memory: &memory{of: make(map[string]*finding)}}
}

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
	if at, info, found := v.memory.find(v.cfg.Root, volume); found {
		return at, info, nil
	}
	// Looked at before anything is read, so that no change in between is missed.
	state, _ := stateOf(v.cfg.Root + "/" + volume)
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
	if err == nil {
		v.memory.keep(volume, state, info, at)
	}
	return at, info, err
}

// Stats measures the filesystem now.
func (v Volumes) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	err = v.ask(target, func(at holder, info abi.Info) error {
		sandbox = at.sandbox
		report, err := fsops.Stat(at.root, info.ReadOnly())
		if err != nil {
			return err
		}
		for _, u := range report.Usage {
			reply.Usage = append(reply.Usage, abi.Usage{Available: u.Available, Total: u.Total, Used: u.Used, Unit: string(u.Unit)})
		}
		report = v.freezer().Judge(abi.DirName(target), report)
		reply.Condition = &abi.Condition{Abnormal: report.Abnormal, Message: report.Message, Reason: report.Reason}
		return nil
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

// Any tells whether any sandbox of the node has a volume, and forgets those that
// have gone.
func (v Volumes) Any() bool {
	v.memory.prune(v.cfg.Root)
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
