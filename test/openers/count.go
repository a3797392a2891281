package openers

import (
	"context"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// mostOpens bounds how often a device is open in these tests.
const mostOpens = 16

// Count returns how often a block device is open, the open for this question not included. A finder
// does not return the number: the device is free only for the right one.
func Count(ctx context.Context, f *openers.Finder, device string) (int, error) {
	fd, err := unix.Open(device, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", device, err)
	}
	defer sys.CloseFD(fd)
	for opens := mostOpens; opens >= 0; opens-- {
		users, asked := f.Await(ctx, openers.Query{FD: fd, Own: opens + 1}, 0)
		if err = asked; err != nil {
			continue // it is open less often
		}
		if users.Names != "" {
			return 0, fmt.Errorf("%s is open more than %d times: %s", device, opens, users.Names)
		}
		return opens, nil
	}
	return 0, err
}

// Partitions opens two partitions of a disk, and the disk itself, one after the other. After each step
// it writes down how often each is open.
func Partitions(ctx context.Context, f *openers.Finder, disk, one, two string) (string, error) {
	var report strings.Builder
	for _, step := range []struct{ name, device string }{
		{"one partition is open", one}, {"and once more", one}, {"and the other partition", two}, {"and the disk", disk},
	} {
		fd, err := unix.Open(step.device, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", fmt.Errorf("%s: %w", step.device, err)
		}
		defer sys.CloseFD(fd)
		var opens [3]int
		for i, device := range []string{disk, one, two} {
			if opens[i], err = Count(ctx, f, device); err != nil {
				return "", err
			}
		}
		_, _ = fmt.Fprintf(&report, "%s: disk %d, one %d, other %d\n", step.name, opens[0], opens[1], opens[2])
	}
	return report.String(), nil
}

// What the kernel makes of partitions. In all kernels, an open of a partition counts on its disk and not the reverse.
const (
	// EachOpenCounts is a kernel that counts each open of a partition on the disk.
	EachOpenCounts = `one partition is open: disk 1, one 1, other 0
and once more: disk 2, one 2, other 0
and the other partition: disk 3, one 2, other 1
and the disk: disk 4, one 2, other 1
`
	// FirstOpenCounts is a kernel that counts only the first.
	FirstOpenCounts = `one partition is open: disk 1, one 1, other 0
and once more: disk 1, one 2, other 0
and the other partition: disk 2, one 2, other 1
and the disk: disk 3, one 2, other 1
`
)
