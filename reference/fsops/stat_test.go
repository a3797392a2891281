package fsops

import (
	"math"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

func TestUsageCountsAsDF(t *testing.T) {
	fs := unix.Statfs_t{Bsize: 4096, Frsize: 512, Blocks: 100, Bfree: 40, Bavail: 30, Files: 10, Ffree: 4}
	want := []abi.Usage{{Available: 30 * 512, Total: 100 * 512, Used: 60 * 512, Unit: abi.UnitBytes}, {Available: 4, Total: 10, Used: 6, Unit: abi.UnitInodes}}
	got := usage(&fs)
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%+v instead of %+v", got, want)
	}
	fs.Files, fs.Ffree = 0, 0
	if got := usage(&fs); len(got) != 1 {
		t.Errorf("inodes of a filesystem that has none: %+v", got)
	}
	fs.Blocks, fs.Bfree, fs.Bavail = math.MaxUint64, math.MaxUint64, 1
	if got := usage(&fs)[0]; got.Total != math.MaxInt64 || got.Used != 0 || got.Available != 512 {
		t.Errorf("a huge one: %+v", got)
	}
	fs.Blocks, fs.Bfree = 1, 2
	if got := usage(&fs)[0]; got.Used != 0 {
		t.Errorf("more free than there is: %+v", got)
	}
}

func TestForgottenFreezeHidesNothing(t *testing.T) {
	whole := report(nil, nil).Condition
	addHeld(whole)
	if !whole.Abnormal || whole.Reason != abi.ReasonFrozen || whole.Message == "" {
		t.Errorf("%+v", whole)
	}
	broken := report(nil, []fault{{abi.ReasonErrors, "errors"}, {abi.ReasonShutDown, "shut down"}}).Condition
	addHeld(broken)
	if broken.Reason != abi.ReasonShutDown || broken.Message != "errors; shut down; "+whole.Message {
		t.Errorf("%+v", broken)
	}
}
