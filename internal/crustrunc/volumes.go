package crustrunc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/fsops"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// Volumes is what can be asked about the volumes that sandboxes have.
type Volumes struct{ cfg Config }

// OpenVolumes gives those of this node, by its configuration.
func OpenVolumes(cfg Config) Volumes { return Volumes{cfg} }

// ask opens the filesystem of a volume in its live sandbox for f.
func (v Volumes) ask(target string, f func(holder, abi.Info) error) error {
	dir, err := abi.Open(v.cfg.Root, abi.DirName(target))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("volume %s: %w: it is not published to this runtime", target, errNoSandbox)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Info()
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	// O_PATH: a filesystem that has shut down answers nothing else any more.
	at, err := findHolder(dir, unix.O_PATH)
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	defer func() { _ = unix.Close(at.root) }()
	if err := f(at, info); err != nil {
		return fmt.Errorf("volume %s: sandbox %s: %w", target, at.sandbox, err)
	}
	return nil
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
		reply.Condition = &abi.Condition{Abnormal: report.Abnormal, Message: report.Message}
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
		device, err := openDevice(info)
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
		dir, err := abi.Open(v.cfg.Root, entry.Name())
		if err != nil {
			continue
		}
		at, err := findHolder(dir, unix.O_PATH)
		_ = dir.Close()
		if err == nil {
			_ = unix.Close(at.root)
			return true
		}
	}
	return false
}
