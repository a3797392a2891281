package runc

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

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
