package claim

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// maxStack bounds how many devices of a stack are examined.
const maxStack = 4096

// blockDevices has a link for each block device, by its number.
const blockDevices = "/sys/dev/block/"

// stackOf lists what else shares its data with the layers of a device, at any depth: what stackIn finds,
// and what is under the loop devices among that, which sysfs does not show.
func stackOf(sysfs string, finder Openers, layers ...identity) ([]identity, error) {
	out := slices.Clone(layers)
	for todo := layers; len(todo) > 0; todo = todo[1:] {
		if !todo[0].Block {
			continue
		}
		found, err := stackIn(sysfs, todo[0].Major, todo[0].Minor)
		if err != nil {
			return nil, err
		}
		for _, device := range found {
			more, err := finder.Layers(device, sys.NoFD)
			if err != nil {
				return nil, err
			}
			for i, layer := range more {
				if slices.Contains(out, layer) {
					continue
				}
				out = append(out, layer)
				if i > 0 {
					todo = append(slices.Clip(todo), layer)
				}
			}
		}
	}
	return out[len(layers):], nil
}

// stackIn lists the block devices whose data the device holds or is held by, at any depth, as far as sysfs knows: the
// disk of a partition, the partitions of a disk, what a dm or md device consists of (slaves), and what is made of it
// (holders). Neighbours are not in it: neither two partitions of one disk nor two logical volumes of one physical
// volume share data.
func stackIn(sysfs string, major, minor uint32) (out []identity, err error) {
	link, err := os.Readlink(sysfs + openers.Number(major, minor))
	if err != nil {
		return nil, sys.UnlessMissing(err) // the device has just gone
	}
	// A partition's directory is inside its disk's.
	start := path.Join(sysfs, link)
	for _, next := range [...]func(dir string) ([]string, error){lowerDevices, upperDevices} {
		seen := map[string]bool{start: true}
		todo, err := next(start)
		for err == nil && len(todo) > 0 && len(seen) < maxStack {
			dir := todo[0]
			todo = todo[1:]
			if seen[dir] {
				continue
			}
			seen[dir] = true
			number, lineErr := sys.ReadLine(dir + "/dev")
			if device, ok := parseNumber(number); ok {
				out = append(out, device)
			}
			more, nextErr := next(dir)
			todo, err = append(todo, more...), errors.Join(sys.UnlessMissing(lineErr), nextErr)
		}
		if err != nil {
			return nil, err
		}
		if len(todo) > 0 {
			return nil, fmt.Errorf("the device %s shares data with more than %d others", openers.Number(major, minor), maxStack)
		}
	}
	return out, nil
}

// parseNumber reads the number of a block device, such as "7:3".
func parseNumber(text string) (device identity, ok bool) {
	first, second, ok := strings.Cut(text, ":")
	major, errA := strconv.ParseUint(first, 10, 12)
	minor, errB := strconv.ParseUint(second, 10, 20)
	return identity{Block: true, Major: uint32(major), Minor: uint32(minor)}, ok && errA == nil && errB == nil
}

func lowerDevices(dir string) ([]string, error) {
	lower, err := linkedDevices(dir + "/slaves")
	if isPartition(dir) {
		lower = append(lower, path.Dir(dir))
	}
	return lower, err
}

func upperDevices(dir string) ([]string, error) {
	upper, err := linkedDevices(dir + "/holders")
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return upper, sys.UnlessMissing(err)
	}
	for _, entry := range entries {
		if sub := dir + "/" + entry.Name(); entry.IsDir() && isPartition(sub) {
			upper = append(upper, sub)
		}
	}
	return upper, nil
}

func isPartition(dir string) bool { return unix.Access(dir+"/partition", unix.F_OK) == nil }

// isReadOnly reports whether the kernel refuses to write to a disk, or may.
func isReadOnly(disk identity) bool {
	flag, err := sys.ReadLine(blockDevices + openers.Number(disk.Major, disk.Minor) + "/ro")
	return err != nil || flag != "0"
}

// linkedDevices resolves the links in a directory of sysfs.
func linkedDevices(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, sys.UnlessMissing(err) // a device without that directory has none
	}
	var out []string
	for _, entry := range entries {
		if link, err := os.Readlink(dir + "/" + entry.Name()); err == nil {
			out = append(out, path.Join(dir, link))
		}
	}
	return out, nil
}
