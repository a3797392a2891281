package sys

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func tableOf(t *testing.T, text string) string {
	t.Helper()
	table := filepath.Join(t.TempDir(), "mountinfo")
	check.Must(t, os.WriteFile(table, []byte(text), 0o600))
	return table
}

func FuzzMountinfo(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("1 2 3:4 / / rw - tmpfs crust:abc rw\n\n - \n")
	f.Add("1 2 3:4 /a\\ /b\\7 rw - t \\134\\777 rw")
	f.Fuzz(func(t *testing.T, text string) {
		check.Value(MountPoints(t.Context(), tableOf(t, text), func(string) bool { return true }))(t)
		_, _ = Mounts(t.Context(), tableOf(t, text), func(string) bool { return true })
	})
}

func TestMounts(t *testing.T) {
	table := tableOf(t, "36 35 98:0 /a\\040b /mnt\\0112 rw shared:1 master:2 - tmpfs crust:ab\\134c rw\nnonsense\n37 35 98:1 / / rw - tmpfs crust: rw\n")
	got, err := Mounts(t.Context(), table, func(line string) bool { return strings.Contains(line, " 98:0 ") })
	want := []*mountinfo.Info{{
		ID: 36, Parent: 35, Major: 98, Root: "/a b", Mountpoint: "/mnt\t2", Options: "rw", Optional: "shared:1 master:2",
		FSType: "tmpfs", Source: `crust:ab\c`, VFSOptions: "rw",
	}}
	diff := cmp.Diff(want, got)
	check.That(t, err == nil && diff == "", "%v\n%s", err, diff)
	got, err = Mounts(t.Context(), table, func(line string) bool { return strings.Contains(line, "sense") })
	check.That(t, err != nil, "a wanted line that cannot be read gives %v", got)
}

// TestMountPoints: the table names the devices of btrfs by their names alone, here of a device that each machine has.
func TestMountPoints(t *testing.T) {
	table := tableOf(t, "36 35 1:3 / /a\\040b rw master:1 - ext4 /dev/x rw\n37 35 0:44 /sub /c rw - btrfs /dev/null rw,subvol=/sub\nnonsense\n"+
		"38 35 0:45 / /d rw - btrfs /proc/self/fd/0 rw\n39 35 0:46 / /e rw - tmpfs /dev/null rw\n40 35 0:47 / /f rw - btrfs\n")
	got, err := MountPoints(t.Context(), table, func(device string) bool { return device != "0:46" })
	diff := cmp.Diff(map[string][]string{"1:3": {"/a b", "/c"}, "0:45": {"/d"}, "0:47": {"/f"}}, got)
	check.That(t, err == nil && diff == "", "%v\n%s", err, diff)
}

// TestTypeAt is by the name alone: what is there, and whether anything is, does not matter.
func TestTypeAt(t *testing.T) {
	for path, want := range map[string]string{"/proc/self/there-is-none": "proc", "/proc": "proc", "/sys/../proc/": "proc", "/sys/class": "sysfs"} {
		got, err := TypeAt(path)
		check.That(t, err == nil && got == want, "%s is of %q, %v", path, got, err)
	}
	root, err := TypeAt("/")
	check.That(t, err == nil && root != "", "the root is of %q, %v", root, err)
	remote, err := IsRemote("/proc/1")
	check.That(t, err == nil && !remote, "proc has a server: %v", err)
}
