package claim

import (
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// maxStack bounds how many devices of a stack are looked at.
const maxStack = 4096

// sysBlock has a link to each block device of the kernel, named by its number.
const sysBlock = "/sys/dev/block/"

// stackOf lists the block devices whose data the device holds or is held by, at any
// depth, as far as sysfs knows: the disk of a partition, the partitions of a disk, what
// a dm or md device consists of (slaves), and what is made of it (holders). Neighbours
// are not in it: neither two partitions of one disk nor two logical volumes of one
// physical volume share data.
func stackOf(major, minor uint32) []identity { return stackIn(sysBlock, major, minor) }

func stackIn(sysfs string, major, minor uint32) []identity {
	link, err := os.Readlink(sysfs + DeviceNumber(major, minor))
	if err != nil {
		return nil
	}
	// A partition's directory is inside its disk's.
	start := path.Join(sysfs, link)
	var out []identity
	for _, next := range [...]func(dir string) []string{lowerDevices, upperDevices} {
		seen := map[string]bool{start: true}
		todo := next(start)
		for len(todo) > 0 && len(seen) < maxStack {
			dir := todo[0]
			todo = todo[1:]
			if seen[dir] {
				continue
			}
			seen[dir] = true
			number, _ := sys.ReadLine(dir + "/dev")
			if device, ok := parseNumber(number, ":"); ok {
				out = append(out, identityOf(device))
			}
			todo = append(todo, next(dir)...)
		}
	}
	return out
}

func lowerDevices(dir string) []string {
	lower := linkedDevices(dir + "/slaves")
	if isPartition(dir) {
		lower = append(lower, path.Dir(dir))
	}
	return lower
}

func upperDevices(dir string) []string {
	upper := linkedDevices(dir + "/holders")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return upper
	}
	for _, entry := range entries {
		// A partition has the name of its disk, and a number.
		if sub := dir + "/" + entry.Name(); entry.IsDir() && strings.HasPrefix(entry.Name(), path.Base(dir)) && isPartition(sub) {
			upper = append(upper, sub)
		}
	}
	return upper
}

func isPartition(dir string) bool { return unix.Access(dir+"/partition", unix.F_OK) == nil }

// linkedDevices resolves the links in a directory of sysfs.
func linkedDevices(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // a device without that directory has none
	}
	var out []string
	for _, entry := range entries {
		if link, err := os.Readlink(dir + "/" + entry.Name()); err == nil {
			out = append(out, path.Join(dir, link))
		}
	}
	return out
}
