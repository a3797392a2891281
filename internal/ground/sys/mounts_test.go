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

// mountsOf reads a mount table of this text.
func mountsOf(t *testing.T, text string, wanted func(string) bool) ([]*mountinfo.Info, error) {
	t.Helper()
	table := filepath.Join(t.TempDir(), "mountinfo")
	check.Must(t, os.WriteFile(table, []byte(text), 0o600))
	return Mounts(t.Context(), table, wanted)
}

func FuzzMountinfo(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("1 2 3:4 / / rw - tmpfs crust:abc rw\n\n - \n")
	f.Add("1 2 3:4 /a\\ /b\\7 rw - t \\134\\777 rw")
	f.Fuzz(func(t *testing.T, text string) {
		check.Value(mountsOf(t, text, func(line string) bool { return DeviceOfMount(line) == "no number" }))(t)
		_, _ = mountsOf(t, text, func(string) bool { return true })
	})
}

func TestMounts(t *testing.T) {
	const text = "36 35 98:0 /a\\040b /mnt\\0112 rw shared:1 master:2 - tmpfs crust:ab\\134c rw\nnonsense\n37 35 98:1 / / rw - tmpfs crust: rw\n"
	got, err := mountsOf(t, text, func(line string) bool { return DeviceOfMount(line) == "98:0" })
	want := []*mountinfo.Info{{
		ID: 36, Parent: 35, Major: 98, Root: "/a b", Mountpoint: "/mnt\t2", Options: "rw", Optional: "shared:1 master:2",
		FSType: "tmpfs", Source: `crust:ab\c`, VFSOptions: "rw",
	}}
	diff := cmp.Diff(want, got)
	check.That(t, err == nil && diff == "", "%v\n%s", err, diff)
	got, err = mountsOf(t, text, func(line string) bool { return strings.Contains(line, "sense") })
	check.That(t, err != nil, "a wanted line that cannot be read gives %v", got)
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
