//go:build system

package containerd

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// shows tells whether mountinfo shows a filesystem of the device. btrfs has a
// device number of its own, so the source counts as well.
func shows(mountinfo []byte, disk string, dev uint64) bool {
	number := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
	for line := range strings.SplitSeq(string(mountinfo), "\n") {
		before, after, _ := strings.Cut(line, " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if len(fields) > 4 && len(rest) > 1 && (fields[2] == number || rest[1] == disk) {
			return true
		}
	}
	return false
}

func deviceNumber(t testing.TB, disk string) uint64 {
	t.Helper()
	var st unix.Stat_t
	check.Must(t, unix.Stat(disk, &st))
	return st.Rdev
}

// wantUnseen fails where a process outside the node's pods, in whatever mount namespace, sees the volume's filesystem.
func (v *volume) wantUnseen() {
	t := v.r.t
	t.Helper()
	dev := deviceNumber(t, v.disk)
	entries, _ := filepath.Glob("/proc/[0-9]*")
	looked := make(map[string]bool)
	for _, proc := range entries {
		pid, err := strconv.Atoi(filepath.Base(proc))
		if err != nil || v.r.node.InPod(pid) {
			continue
		}
		namespace, _ := os.Readlink(proc + "/ns/mnt")
		if namespace == "" || looked[namespace] {
			continue
		}
		looked[namespace] = true
		raw, _ := os.ReadFile(proc + "/mountinfo")
		if shows(raw, v.disk, dev) {
			command, _ := os.ReadFile(proc + "/cmdline")
			t.Errorf("process %d (%q) sees the volume's filesystem", pid, command)
		}
	}
	check.That(t, len(looked) != 0, "no mount namespace was found")
}

type usage struct{ bytesTotal, bytesAvailable, bytesUsed, inodesTotal, inodesAvailable, inodesUsed int64 }

func (r *testNode) df(container string) usage {
	r.t.Helper()
	out := r.exec(container, "stat -f -c '%b %f %a %S %c %d' /data")
	var blocks, free, available, size, inodes, inodesFree int64
	check.Must(r.t, check.Err(fmt.Sscan(out, &blocks, &free, &available, &size, &inodes, &inodesFree)))
	return usage{
		bytesTotal: blocks * size, bytesAvailable: available * size, bytesUsed: (blocks - free) * size,
		inodesTotal: inodes, inodesAvailable: inodesFree, inodesUsed: inodes - inodesFree,
	}
}

func usageOf(reply *runtimev1.RuntimeGetVolumeStatsResponse) (u usage) {
	for _, one := range reply.GetUsage() {
		switch one.GetUnit() {
		case runtimev1.VolumeUsage_BYTES:
			u.bytesTotal, u.bytesAvailable, u.bytesUsed = one.GetTotal(), one.GetAvailable(), one.GetUsed()
		case runtimev1.VolumeUsage_INODES:
			u.inodesTotal, u.inodesAvailable, u.inodesUsed = one.GetTotal(), one.GetAvailable(), one.GetUsed()
		}
	}
	return u
}

// wantStats wants the daemon to tell to the byte what df tells inside. Both are
// asked until they agree for once, because filesystems work behind our back.
func (v *volume) wantStats(container string) {
	v.r.t.Helper()
	var inside, told usage
	check.Eventually(v.r.t, "stats are what df tells", func() bool {
		reply, err := v.stats()
		if err != nil {
			v.r.t.Logf("stats: %v", err)
			return false
		}
		check.Require(v.r.t, !reply.GetVolumeCondition().GetAbnormal(),
			"the volume is told to be abnormal: %s", reply.GetVolumeCondition().GetMessage())
		told, inside = usageOf(reply), v.r.df(container)
		return told == inside && told.bytesTotal > 0
	})
}

// wantSum wants a file on the volume to be what a container said that it is.
func (v *volume) wantSum(name, sum string) {
	v.r.t.Helper()
	v.onHost(func(dir string) {
		got := fmt.Sprintf("%x", checksum(v.r.t, filepath.Join(dir, name)))
		check.That(v.r.t, got == sum, "%s has changed: %s is not %s", name, got, sum)
	})
}

// write writes a file on the volume and gives its checksum.
func (r *testNode) write(container, path string) string {
	r.t.Helper()
	out := r.exec(container, "dd if=/dev/urandom of="+path+" bs=64k count=32 2>/dev/null && sync && sha256sum "+path)
	return strings.Fields(out)[0]
}
func checksum(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	file := check.Value(os.Open(path))(t)
	defer func() { _ = file.Close() }()
	sum := sha256.New()
	check.Must(t, check.Err(io.Copy(sum, file)))
	return [sha256.Size]byte(sum.Sum(nil))
}
