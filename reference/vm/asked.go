package vm

import (
	"errors"
	"fmt"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// Stats measures the filesystem now.
func (v asked) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	a, sandbox, err := v.ask(request{Do: abi.Stats, Target: target})
	if a.Stats != nil {
		reply = *a.Stats
	}
	return reply, sandbox, err
}

// Resize makes the filesystem as large as its device.
func (v asked) Resize(target string, least, most int64) (int64, error) {
	a, _, err := v.ask(request{Do: abi.Resize, Target: target, Least: least, Most: most})
	return a.Size, err
}

// Freeze holds all writes until Thaw, or until the time is over.
func (v asked) Freeze(target string, timeout time.Duration) error {
	_, _, err := v.ask(request{Do: abi.Freeze, Target: target, Timeout: timeout})
	return err
}

// Thaw lets writes go on. A machine that has ended has frozen nothing any more, and whoever
// read the device meanwhile has to learn of it.
func (v asked) Thaw(target string) error {
	_, _, err := v.ask(request{Do: abi.Thaw, Target: target})
	if errors.Is(err, handler.ErrNoSandbox) {
		err = fmt.Errorf("volume %s: %w: no sandbox has it", target, fsops.ErrNotFrozen)
	}
	return err
}

// ThawExpired has nothing to do: each guest thaws by itself.
func (asked) ThawExpired() abi.ThawExpiredReply { return abi.ThawExpiredReply{} }
