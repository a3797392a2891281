//go:build system

package openers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestPartitionedDisk: an opener of a partition has the disk open too, and an opener of the disk does
// not have the partition open. Kernels differ in how they count a partition's second open.
func TestPartitionedDisk(t *testing.T) {
	f, disk := counting(t), rig.Disk(t, 32*mib, "")
	one, two := partition(t, disk, "1", "2048"), partition(t, disk, "2", "32768")
	check.Succeeds(t, "nobody else looks at the disk meanwhile", func() error {
		report, err := Partitions(t.Context(), f, disk, one, two)
		if err == nil && report != EachOpenCounts && report != FirstOpenCounts {
			err = fmt.Errorf("the kernel counts\n%s", report)
		}
		if err == nil {
			t.Logf("the kernel counts\n%s", report)
		}
		return err
	})
	ask := func(device string) openers.Query { return openers.Query{FD: open(t, device), Own: 1} }
	whole := ask(disk)

	// Only the partition was opened, so the process is not named.
	h := rig.HoldBy(t, opening(t, "cat", "<>", one))
	wantUsers(t, f, whole, theKernel)
	h.End()
	wantUsers(t, f, whole, "")

	h = rig.HoldBy(t, opening(t, "cat", "<>", disk))
	wantUsers(t, f, whole, processName(h, "cat"))
	part := ask(one)
	wantUsers(t, f, part, "")
	h.End()

	h = rig.HoldBy(t, opening(t, "cat", "<>", one))
	wantUsers(t, f, part, processName(h, "cat"))
	wantUsers(t, f, ask(two), "")
	h.End()
	wantUsers(t, f, part, "")
}

// partition makes a partition of 12 MiB, and a node for it: /dev may have none.
func partition(t *testing.T, disk, number, start string) string {
	t.Helper()
	rig.Command(t, "addpart", disk, number, start, "24576")
	t.Cleanup(func() { _ = exec.Command("delpart", disk, number).Run() })
	name := filepath.Base(disk) + "p" + number
	raw := check.Value(os.ReadFile("/sys/class/block/" + name + "/dev"))(t)
	var major, minor uint32
	check.Must(t, check.Err(fmt.Sscanf(string(raw), "%d:%d", &major, &minor)))
	node := filepath.Join(t.TempDir(), name)
	check.Must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor)))) //nolint:gosec // small
	return node
}
