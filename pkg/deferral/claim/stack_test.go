package claim

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// fakeSysfs builds devices as sysfs shows them: name, number and slaves; a name with a slash is a partition.
func fakeSysfs(t *testing.T, devices [][3]string) string {
	t.Helper()
	root := t.TempDir()
	must := func(err error) {
		t.Helper()
		check.Must(t, err)
	}
	dir := func(name string) string { return filepath.Join(root, "devices", name) }
	must(os.MkdirAll(filepath.Join(root, "dev", "block"), 0o700))
	for _, d := range devices {
		name, number, slave := d[0], d[1], d[2]
		must(os.MkdirAll(dir(name)+"/holders", 0o700))
		must(os.WriteFile(dir(name)+"/dev", []byte(number+"\n"), 0o600))
		must(os.Symlink("../../devices/"+name, filepath.Join(root, "dev", "block", number)))
		if filepath.Dir(name) != "." {
			must(os.WriteFile(dir(name)+"/partition", []byte("1\n"), 0o600))
			continue
		}
		must(os.Mkdir(dir(name)+"/slaves", 0o700))
		if slave != "" {
			link := func(in, to string) {
				rel, err := filepath.Rel(in, dir(to))
				must(err)
				must(os.Symlink(rel, filepath.Join(in, filepath.Base(to))))
			}
			link(dir(name)+"/slaves", slave)
			link(dir(slave)+"/holders", name)
		}
	}
	return filepath.Join(root, "dev", "block") + "/"
}

// TestStack: a device shares data with what is below and above it, and not with its neighbours.
func TestStack(t *testing.T) {
	sysfs := fakeSysfs(t, [][3]string{
		{"sda", "8:0", ""}, {"sda/sda1", "8:1", ""}, {"sda/sda2", "8:2", ""},
		{"dm-0", "253:0", "sda/sda2"}, {"dm-1", "253:1", "sda/sda2"}, {"dm-2", "253:2", "dm-1"}, {"sdb", "8:16", ""},
	})
	for number, want := range map[[2]uint32][]identity{
		{8, 0}:   {block(8, 1), block(8, 2), block(253, 0), block(253, 1), block(253, 2)},
		{8, 1}:   {block(8, 0)},
		{8, 2}:   {block(8, 0), block(253, 0), block(253, 1), block(253, 2)},
		{253, 0}: {block(8, 0), block(8, 2)},
		{253, 1}: {block(8, 0), block(8, 2), block(253, 2)},
		{253, 2}: {block(8, 0), block(8, 2), block(253, 1)},
		{8, 16}:  nil,
		{9, 9}:   nil,
	} {
		got := check.Value(stackIn(sysfs, number[0], number[1]))(t)
		slices.SortFunc(got, func(x, y identity) int { return cmp.Or(cmp.Compare(x.Major, y.Major), cmp.Compare(x.Minor, y.Minor)) })
		check.That(t, slices.Equal(got, want), "%v: %v, want %v", number, got, want)
	}
	// A loop device over an image, whose filesystem is on a device of the stack.
	image := openers.File{Major: 253, Minor: 2, Inode: 5}
	got, err := stackOf(sysfs, &fakeOpeners{under: []openers.File{image}}, block(8, 1), image)
	check.That(t, err == nil && slices.Equal(got, []identity{block(8, 0)}), "%v, %v", got, err)
	check.WithoutDescriptors(t, func() {
		got, err := stackOf(sysfs, &fakeOpeners{}, image, block(8, 0))
		check.That(t, err != nil, "a stack that cannot be read: %v", got)
	})
}

// TestHeaderSize: an image is no mapping, though the device of its filesystem may be one.
func TestHeaderSize(t *testing.T) {
	sysfs := fakeSysfs(t, [][3]string{{"dm-0", "253:0", ""}, {"dm-1", "253:1", ""}, {"sda", "8:0", ""}})
	for device, uuid := range map[string]string{"dm-0": "CRYPT-LUKS2-0a1b-pvc-1", "dm-1": "LVM-0a1b"} {
		check.Must(t, os.Mkdir(sysfs+"../../devices/"+device+"/dm", 0o700))
		check.Must(t, os.WriteFile(sysfs+"../../devices/"+device+"/dm/uuid", []byte(uuid+"\n"), 0o600))
	}
	for device, want := range map[identity]int64{block(253, 0): 16 << 20, block(253, 1): 0, block(8, 0): 0, {Major: 253, Inode: 5}: 0} {
		check.Equal(t, headerIn(sysfs, deviceAs(device)), want, "%v", device)
	}
}

// TestStackThatCannotBeRead is a process without free descriptors: a disk whose partitions
// cannot be listed may have some. So may a device with more of them than are looked at.
func TestStackThatCannotBeRead(t *testing.T) {
	root := check.Value(os.MkdirTemp("/dev/shm", "sysfs"))(t) // a disk takes ten seconds for it
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	check.Must(t, os.Symlink("sdb", filepath.Join(root, "8:16")))
	for i := range maxStack + 1 {
		check.Must(t, os.MkdirAll(filepath.Join(root, "sdb", fmt.Sprint("sdb", i), "partition"), 0o700))
	}
	check.Fails(t, check.Err(stackIn(root+"/", 8, 16))) // or a device with many partitions is known
	sysfs := fakeSysfs(t, [][3]string{{"sda", "8:0", ""}, {"sda/sda1", "8:1", ""}})
	check.WithoutDescriptors(t, func() {
		for minor := range uint32(2) {
			got, err := stackIn(sysfs, 8, minor)
			check.That(t, err != nil, "8:%d: %v", minor, got)
		}
	})
}
