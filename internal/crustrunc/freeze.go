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

func (o ops) freezer() fsops.Freezer {
	return fsops.Freezer{
		Dir: filepath.Join(o.cfg.StateDir, "frozen"), Watchdog: []string{"/proc/self/exe", abi.Word, commandWatch},
	}
}

// freeze holds all writes until thaw, or until the time is over.
func (o ops) freeze(target string, timeout time.Duration) error {
	return o.ask(target, func(at holder, _ abi.Info) error {
		return o.freezer().Freeze(abi.DirName(target), at.root, timeout)
	})
}

// thaw lets writes go on. It needs no live sandbox: one that died frozen must be
// able to go.
func (o ops) thaw(target string) error {
	err := o.freezer().Thaw(abi.DirName(target))
	if errors.Is(err, fsops.ErrNotFrozen) {
		err = fmt.Errorf("%w: what was read of its device meanwhile may be of different times", err)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %w", target, err)
	}
	return nil
}
