package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// pollInterval is how often the kernel is polled.
const pollInterval = 20 * time.Millisecond

// retry calls f until it succeeds, or fails with another error than transient.
func retry(ctx context.Context, transient error, f func() error) error {
	for {
		err := f()
		if !errors.Is(err, transient) || !sys.Sleep(ctx, pollInterval) {
			return err
		}
	}
}

// findDisk waits for the disk with a serial and returns its device. The kernel lists a disk
// shortly before it can be opened.
func findDisk(ctx context.Context, serial string) (device string, err error) {
	err = retry(ctx, os.ErrNotExist, func() error {
		file, err := findBy("/sys/block/*/serial", serial)
		if err != nil {
			return err
		}
		device = "/dev/" + filepath.Base(filepath.Dir(file))
		fd, err := unix.Open(device, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		sys.CloseFD(fd)
		if errors.Is(err, unix.ENXIO) {
			return os.ErrNotExist
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("the disk has not appeared: %w", err)
	}
	return device, nil
}

// waitSize waits until the kernel has noticed that the host made a disk larger.
func waitSize(ctx context.Context, device int, required int64) error {
	for {
		size, err := unix.Seek(device, 0, unix.SEEK_END)
		if err != nil || size >= required || !sys.Sleep(ctx, pollInterval) {
			return err
		}
	}
}

// completedRequests changes whenever a disk has completed a request.
func completedRequests() (counts string) {
	files, _ := filepath.Glob("/sys/block/vd*/stat")
	for _, file := range files {
		raw, _ := os.ReadFile(file) //nolint:gosec // the kernel's
		if fields := strings.Fields(string(raw)); len(fields) > 11 {
			counts += fields[0] + " " + fields[4] + " " + fields[11] + "\n" // reads, writes and discards
		}
	}
	return counts
}

// waitFree waits until nothing uses a disk any more: the kernel releases a filesystem some time after its last unmount.
func waitFree(ctx context.Context, device string) error {
	err := retry(ctx, unix.EBUSY, func() error {
		fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		sys.CloseFD(fd)
		return err
	})
	if err != nil {
		return fmt.Errorf("the disk is not free: %w", err)
	}
	return nil
}
