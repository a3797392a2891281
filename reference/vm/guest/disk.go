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

// findDisk waits for the disk with a serial and gives its device.
func findDisk(ctx context.Context, serial string) (string, error) {
	for {
		file, err := findBy("/sys/block/*/serial", serial)
		if err == nil {
			device := "/dev/" + filepath.Base(filepath.Dir(file))
			if _, err = os.Stat(device); err == nil {
				return device, nil
			}
		}
		if !errors.Is(err, os.ErrNotExist) || !sys.Sleep(ctx, pollTime) {
			return "", fmt.Errorf("the disk has not come: %w", err)
		}
	}
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
	for {
		fd, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
		if err == nil {
			return unix.Close(fd)
		}
		if !errors.Is(err, unix.EBUSY) || !sys.Sleep(ctx, pollTime) {
			return fmt.Errorf("the disk is not free: %w", err)
		}
	}
}
