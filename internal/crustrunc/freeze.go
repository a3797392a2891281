package crustrunc

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/fsops"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// commandWatch is how this program starts itself to thaw what was frozen and
// forgotten.
const commandWatch = "watch-frozen"

func (v Volumes) freezer() fsops.Freezer {
	return fsops.Freezer{
		Dir: filepath.Join(v.cfg.StateDir, "frozen"), Watchdog: []string{"/proc/self/exe", abi.Word, commandWatch},
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
	err := v.freezer().Thaw(abi.DirName(target))
	if errors.Is(err, fsops.ErrNotFrozen) {
		err = fmt.Errorf("%w: what was read of its device meanwhile may be of different times", err)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	return nil
}
