package handler

import (
	"fmt"
	"io"
	"math"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

// minuteFreezer are volumes that may be frozen for a minute.
type minuteFreezer struct{ Volumes }

func (minuteFreezer) Freeze(_ string, timeout time.Duration) error {
	if timeout <= 0 || timeout > time.Minute {
		return fsops.ErrOutOfRange
	}
	return nil
}

// A time that is too long for a duration is out of range, not a short one.
func TestFreezeForTooLong(t *testing.T) {
	cli := CLI{Name: "crust-test", Open: func() (Volumes, string, error) { return minuteFreezer{}, "", nil }}
	for seconds, want := range map[int64]int{
		0: abi.ExitOutOfRange, 60: abi.ExitOK, 61: abi.ExitOutOfRange,
		18446744074: abi.ExitOutOfRange, math.MaxInt64: abi.ExitOutOfRange,
	} {
		if got := cli.Main([]string{abi.Freeze, "/target", fmt.Sprint(seconds)}, io.Discard, io.Discard); got != want {
			t.Errorf("%d s: exit status %d, want %d", seconds, got, want)
		}
	}
}
