package crustdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/loopdev"
)

func (d *Driver) image(id string) string { return filepath.Join(d.images, fileName(id)+".img") }

// makeImage makes the image, or lets it grow to the capacity; it never shrinks.
func (d *Driver) makeImage(r *record) (err error) {
	flags := os.O_RDWR
	if !r.Ready {
		flags |= os.O_CREATE // an image that was there and is gone is a loss, not a start
	}
	file, err := os.OpenFile(d.image(r.ID), flags, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return status.Errorf(codes.DataLoss, "volume %q: its image is gone", r.ID)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.Size() >= r.Capacity {
		return nil
	}
	if err := file.Truncate(r.Capacity); err != nil {
		return fmt.Errorf("volume %q: give its image %d bytes: %w", r.ID, r.Capacity, err)
	}
	return errors.Join(file.Sync(), syncDir(d.images))
}

// attached finds the volume's loop devices.
func (d *Driver) attached(id string) ([]loopdev.Attached, error) {
	info, err := os.Stat(d.image(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return loopdev.Over(info)
}

// leavingTries and leavingPause bound the wait for a device that goes away when
// its last user, say a probe of udev's, has closed it.
const (
	leavingTries = 20
	leavingPause = 50 * time.Millisecond
)

// attach gives the volume's loop device, and makes it where there is none.
func (d *Driver) attach(id string, readOnly bool) (string, error) {
	for range leavingTries {
		found, err := d.attached(id)
		if err != nil {
			return "", err
		}
		leaving := false
		for _, one := range found {
			if leaving = leaving || one.Leaving; !one.Leaving && one.ReadOnly == readOnly {
				return one.Path, nil
			}
		}
		if !leaving {
			path, err := loopdev.Attach(d.image(id), loopdev.Options{ReadOnly: readOnly, DirectIO: true})
			failpoint.Hit("driver-attached")
			return path, err
		}
		time.Sleep(leavingPause)
	}
	return "", status.Errorf(codes.Aborted, "volume %q: another program still uses the loop device of its last use", id)
}

// detach frees the volume's loop devices, or only the read-only ones.
func (d *Driver) detach(id string, onlyReadOnly bool) error {
	found, err := d.attached(id)
	if err != nil {
		return err
	}
	for _, one := range found {
		if one.Leaving || onlyReadOnly && !one.ReadOnly {
			continue
		}
		err = errors.Join(err, loopdev.Detach(one.Path))
		failpoint.Hit("driver-detached")
	}
	return err
}

// growDevices makes the loop devices as large as the image.
func (d *Driver) growDevices(id string) error {
	found, err := d.attached(id)
	if err != nil {
		return err
	}
	for _, one := range found {
		err = errors.Join(err, loopdev.Grow(one.Path))
	}
	return err
}

// erase removes a volume that is not attached. The record first says that the
// image is to go, so that nobody takes a missing image for a loss.
func (d *Driver) erase(r *record) error {
	r.Ready = false
	if err := d.store.save(r); err != nil {
		return err
	}
	failpoint.Hit("driver-erasing")
	if err := os.Remove(d.image(r.ID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := syncDir(d.images); err != nil {
		return err
	}
	failpoint.Hit("driver-image-removed")
	return d.store.remove(r.ID)
}

// sweep removes the volumes that were never finished, or not yet removed.
func (d *Driver) sweep() error {
	if err := d.store.clean(); err != nil {
		return err
	}
	all, err := d.store.list()
	if err != nil {
		d.log.Error("some records cannot be read; their volumes are left alone", zap.Error(err))
	}
	for _, r := range all {
		if r.Ready {
			continue
		}
		if devices, err := d.attached(r.ID); err != nil || len(devices) > 0 {
			d.log.Warn("an unfinished volume is attached and left alone", zap.String("volume", r.ID), zap.Error(err))
			continue
		}
		if err := d.erase(r); err != nil {
			return fmt.Errorf("remove the unfinished volume %q: %w", r.ID, err)
		}
	}
	return nil
}
