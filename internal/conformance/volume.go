package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// volume is a published volume, as the broker leaves it.
type volume struct {
	n      *node
	disk   *disk
	owner  string // the pod's UID
	target string
	dir    string // of the ABI
	said   deferral.Volume
}

// newVolume publishes a volume of a pod on a disk.
func (n *node) newVolume(d *disk, pod string) (*volume, error) { return n.newNamedVolume(d, pod, "pv") }

func (n *node) newNamedVolume(d *disk, pod, name string) (*volume, error) {
	v := &volume{n: n, disk: d, owner: pod, target: n.path("kubelet", "pods", pod, "volumes", "kubernetes.io~csi", name, "mount")}
	if err := os.MkdirAll(v.target, 0o750); err != nil {
		return nil, err
	}
	key := abi.DirName(v.target)
	v.dir = filepath.Join(n.opts.Root, key)
	v.said = deferral.Volume{
		ResolvedTarget: v.target, FSType: n.opts.FSType, PodUID: pod,
		Device: deferral.Device{Kind: deferral.BlockDevice, Path: d.path, Major: d.major, Minor: d.minor},
	}
	if err := deferral.MountGuard(deferral.Key(key), v.target); err != nil {
		return nil, fmt.Errorf("mount the guard at %s: %w", v.target, err)
	}
	n.later(func(context.Context) error { return unmountAll(v.target) })
	n.later(func(context.Context) error { return os.RemoveAll(v.dir) })
	return v, v.publish()
}

// publish writes what the broker says of the volume, in the broker's way.
func (v *volume) publish() error {
	raw, err := abi.Encode(&v.said)
	if err != nil {
		return err
	}
	return v.publishRaw(raw)
}

func (v *volume) publishRaw(raw []byte) error {
	temp, err := os.MkdirTemp(v.n.opts.Root, ".conformance-")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(temp, abi.InfoName), raw, 0o600); err != nil {
		return errors.Join(err, os.RemoveAll(temp))
	}
	err = os.Rename(temp, v.dir)
	if errors.Is(err, os.ErrExist) {
		// It is there: the file alone is replaced.
		err = os.Rename(filepath.Join(temp, abi.InfoName), filepath.Join(v.dir, abi.InfoName))
	}
	return errors.Join(err, os.RemoveAll(temp))
}

// publishOdd says something else than the truth.
func (v *volume) publishOdd(change func(*abi.Info)) error {
	raw, err := abi.Encode(&v.said)
	if err != nil {
		return err
	}
	var info abi.Info
	if err := json.Unmarshal(raw, &info); err != nil {
		return err
	}
	change(&info)
	if raw, err = json.Marshal(info); err != nil {
		return err
	}
	return v.publishRaw(raw)
}

// unpublish takes the directory away, and leaves the guard.
func (v *volume) unpublish() error { return os.RemoveAll(v.dir) }

// unbind drops what the handler has left of dead sandboxes, as the broker does.
func (v *volume) unbind() error {
	entries, err := os.ReadDir(v.dir)
	for _, entry := range entries {
		if entry.Name() != abi.InfoName {
			err = errors.Join(err, os.Remove(filepath.Join(v.dir, entry.Name())))
		}
	}
	return err
}

// open opens the directory as the broker does.
func (v *volume) open() (*abi.Dir, error) { return abi.Open(v.n.opts.Root, filepath.Base(v.dir)) }

// covered fails where anything but the guard is to be seen on the host's target.
func (v *volume) covered() error {
	var fs unix.Statfs_t
	if err := unix.Statfs(v.target, &fs); err != nil {
		return err
	}
	if fs.Type != unix.TMPFS_MAGIC || fs.Blocks != 1 {
		return fmt.Errorf("the host sees something else than the guard at %s", v.target)
	}
	return nil
}

// bindSub makes a sub-directory in the guard and binds it, as kubelet does for a
// subPath: through a descriptor, to a place of its own.
func (v *volume) bindSub(sub string) (place string, err error) {
	inside := filepath.Join(v.target, sub)
	if err := os.MkdirAll(inside, 0o750); err != nil {
		return "", err
	}
	v.n.count++
	place = v.n.path("kubelet", "pods", v.owner, "volume-subpaths", "pv", "main", fmt.Sprint(v.n.count))
	if err := os.MkdirAll(place, 0o750); err != nil {
		return "", err
	}
	fd, err := unix.Open(inside, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), place, "", unix.MS_BIND, ""); err != nil {
		return "", fmt.Errorf("bind %s: %w", inside, err)
	}
	v.n.later(func(context.Context) error { return unmountAll(place) })
	return place, nil
}
