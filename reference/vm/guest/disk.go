package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// pollTime is how often the kernel is asked for what takes a moment.
const pollTime = 20 * time.Millisecond

// retry calls f until its error is another one than that of what takes a moment.
func retry(ctx context.Context, moment error, f func() error) error {
	for {
		err := f()
		if !errors.Is(err, moment) || !sys.Sleep(ctx, pollTime) {
			return err
		}
	}
}

// findDisk waits for the disk with a serial and gives its device. The kernel shows a disk a
// moment before it can be opened.
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
		return "", fmt.Errorf("the disk has not come: %w", err)
	}
	return device, nil
}

// waitSize waits until a disk has at least so many bytes: the kernel sees a while later
// that the host made it larger.
func waitSize(ctx context.Context, device int, least int64) error {
	for {
		size, err := diskSize(device)
		if err != nil || size >= least || !sys.Sleep(ctx, pollTime) {
			return err
		}
	}
}

func diskSize(device int) (int64, error) { return unix.Seek(device, 0, unix.SEEK_END) }

// waitFree waits until nothing uses a disk any more: the kernel lets go of a filesystem
// some time after its last mount.
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
