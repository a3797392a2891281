//go:build system

package driver_test

import (
	"os"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestProbesOfALoopDevice has another program, such as udev or losetup, look at the loop
// device while its volume is unstaged. The device goes when that has closed it.
func TestProbesOfALoopDevice(t *testing.T) {
	r := newDriver(t, false)
	v := r.volume("probed", rig.BlockAccess())
	v.up()
	probe := func() *os.File {
		file, err := os.Open(r.loops()[0])
		check.Must(t, err)
		return file
	}
	short := probe()
	v.must(v.unpublish, v.unstage)
	time.AfterFunc(200*time.Millisecond, func() { _ = short.Close() })
	v.must(v.stage, v.publish)
	short = probe()
	v.must(v.unpublish, v.unstage)
	time.AfterFunc(200*time.Millisecond, func() { _ = short.Close() })
	made := v.mustSnapshot("s").GetSnapshotId()
	check.That(t, r.consistent(made), "a device that is leaving counts as in use")
	check.Must(t, r.removeSnapshot(made))
	v.must(v.stage, v.publish)
	long := probe()
	v.must(v.unpublish, v.unstage)
	check.Code(t, v.stage(), codes.Aborted)
	check.Code(t, v.remove(), codes.FailedPrecondition)
	time.AfterFunc(200*time.Millisecond, func() { _ = long.Close() })
	v.must(v.remove)
}
