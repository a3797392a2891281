package crustdriver

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// makeFS makes the filesystem where the device is blank.
func (d *Driver) makeFS(ctx context.Context, id, device string, want access) error {
	fd, err := unix.Open(device, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("volume %q: open %s: %w", id, device, err)
	}
	defer func() { _ = unix.Close(fd) }()
	_, err = d.formatter.Prepare(ctx, fd, id, device, want.fsType, deferral.FormatHost, want.readOnly)
	return err
}
