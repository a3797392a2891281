package crustrunc

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/fsops"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// ops is what can be asked about a volume that a sandbox has.
type ops struct{ cfg Config }

// ask opens the filesystem of a volume in its live sandbox for f.
func (o ops) ask(target string, f func(holder, abi.Info) error) error {
	dir, err := abi.Open(o.cfg.Root, abi.DirName(target))
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

// stats measures the filesystem now.
func (o ops) stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	err = o.ask(target, func(at holder, info abi.Info) error {
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

// resize makes the filesystem as large as its device.
func (o ops) resize(target string, least, most int64) (size int64, err error) {
	err = o.ask(target, func(at holder, info abi.Info) error {
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
