//go:build system

package fsops_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func (f *filesystem) df(unit string) abi.Usage {
	f.t.Helper()
	args := []string{"-B1", "--output=avail,size,used", f.dir}
	if unit == abi.UnitInodes {
		args = []string{"--output=iavail,itotal,iused", f.dir}
	}
	lines := strings.Split(strings.TrimSpace(rig.Command(f.t, "df", args...)), "\n")
	fields := strings.Fields(lines[len(lines)-1])
	number := func(i int) int64 {
		return check.Value(strconv.ParseInt(fields[i], 10, 64))(f.t)
	}
	return abi.Usage{Unit: unit, Available: number(0), Total: number(1), Used: number(2)}
}

func (f *filesystem) stat() abi.StatsReply {
	f.t.Helper()
	report, err := fsops.Stat(f.root, false)
	check.Require(f.t, err == nil, "%s: %v", f.kind, err)
	return report
}

func (f *filesystem) wantAbnormal(reason string, words ...string) {
	f.t.Helper()
	report := f.stat().Condition
	// The kernel counts errors a moment after they happen.
	for tries := 0; tries < 200 && !strings.Contains(report.Message, words[0]); tries++ {
		time.Sleep(10 * time.Millisecond)
		report = f.stat().Condition
	}
	check.That(f.t, report.Abnormal && report.Reason == reason, "%s: not abnormal by %s: %+v", f.kind, reason, report)
	check.Says(f.t, f.kind, report.Message, words...)
}

func TestUsageIsWhatDFTells(t *testing.T) {
	for _, kind := range filesystems {
		t.Run(kind, func(t *testing.T) {
			f := newFilesystem(t, kind, size)
			for _, fill := range []int64{0, 1, 7*mib + 13} {
				check.Must(t, os.WriteFile(filepath.Join(f.dir, "file"), make([]byte, fill), 0o600))
				unix.Sync()
				want := []abi.Usage{f.df(abi.UnitBytes), f.df(abi.UnitInodes)}
				if kind == "btrfs" {
					want = want[:1]
				}
				report := f.stat()
				check.That(t, slices.Equal(report.Usage, want), "%+v, df says %+v", report.Usage, want)
				check.That(t, !report.Condition.Abnormal && report.Condition.Message == "", "%+v", report.Condition)
			}
		})
	}
}

func TestReadOnlyOnPurposeIsNormal(t *testing.T) {
	for _, kind := range filesystems {
		f := newFilesystem(t, kind, size)
		check.Must(t, unix.Mount("", f.dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		report, err := fsops.Stat(f.root, true)
		check.That(t, err == nil && !report.Condition.Abnormal, "%s: %+v, %v", kind, report.Condition, err)
		f.wantAbnormal(abi.ReasonReadOnly, "read-only")
	}
}

// shutdown stops a filesystem, as a device that fails for good does.
func (f *filesystem) shutdown() {
	f.t.Helper()
	const request, withoutFlush = 0x8004587d, 2 // of ext4 and xfs alike
	check.Must(f.t, unix.IoctlSetPointerInt(openFD(f.t, f.dir, unix.O_RDONLY), request, withoutFlush))
}

func TestShutDownFilesystemIsAbnormal(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		f := newFilesystem(t, kind, size)
		f.shutdown()
		f.wantAbnormal(abi.ReasonShutDown, "shut")
	}
}

func TestErrorsOnRecordAreAbnormal(t *testing.T) {
	f := newFilesystem(t, "ext4", size)
	check.Must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(f.device)+"/trigger_fs_error", []byte("a test"), 0o200))
	f.wantAbnormal(abi.ReasonErrors, "errors on record (1)", "e2fsck")
	// The record stays over a mount.
	f.unmount()
	again := mounted(t, "ext4", f.device, 0, "")
	again.wantAbnormal(abi.ReasonErrors, "on record")
	again.unmount()
	wantFree(t, f.device)
	_ = exec.Command("e2fsck", "-f", "-y", f.device).Run()
	report := mounted(t, "ext4", f.device, 0, "").stat().Condition
	check.That(t, !report.Abnormal, "after e2fsck: %+v", report)
}

func TestErrorThatStopsWritingIsAbnormal(t *testing.T) {
	device := rig.Disk(t, size, "ext4")
	f := mounted(t, "ext4", device, 0, "errors=remount-ro")
	check.Must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(device)+"/trigger_fs_error", []byte("a test"), 0o200))
	f.wantAbnormal(abi.ReasonReadOnly, "on record", "stopped writing")
}

// overwrite spoils a block of the device that begins with a text.
func overwrite(t testing.TB, device, text string) {
	t.Helper()
	file := check.Value(os.OpenFile(device, os.O_RDWR|unix.O_SYNC, 0))(t)
	defer func() { check.Must(t, file.Close()) }()
	block := make([]byte, 4096)
	for at := int64(0); ; at += int64(len(block)) {
		_, err := file.ReadAt(block, at)
		check.Require(t, err == nil, "%q is not on %s: %v", text, device, err)
		if strings.HasPrefix(string(block), text) {
			check.Must(t, check.Err(file.WriteAt([]byte("spoiled"), at)))
			return
		}
	}
}

func TestDamageThatBtrfsCountsIsAbnormal(t *testing.T) {
	f := newFilesystem(t, "btrfs", size)
	text := strings.Repeat("to be spoiled ", 1000)
	check.Must(t, os.WriteFile(filepath.Join(f.dir, "file"), []byte(text), 0o600))
	f.unmount()
	wantFree(t, f.device)
	overwrite(t, f.device, text[:100])
	f = mounted(t, "btrfs", f.device, 0, "")
	check.Require(t, check.Err(os.ReadFile(filepath.Join(f.dir, "file"))) != nil, "btrfs did not see it")
	f.wantAbnormal(abi.ReasonErrors, "corruptions of its device 1")
}
