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
