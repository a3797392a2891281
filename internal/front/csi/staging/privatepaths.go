package staging

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// PrivatePaths are the paths at which a driver stages and publishes devices. They are in the directory of kubelet's own
// raw block volumes, because drivers derive from the path what unstage and unpublish requests do not say, such as the
// volume's type. A device is staged in a directory, and published at a file that the driver creates. The paths are
// hashes of the request alone, so volumes can be unstaged even if all records are lost.
type PrivatePaths struct {
	kubeletRoot, dir string
	// used are other values of front.privateDir at which volumes are still staged.
	used []string
}

const (
	stagingDir = "staging"
	publishDir = "publish"
	deviceName = "device" // the published device where no pod is known
)

// NewPrivatePaths returns the paths below a directory of the kubelet root. Volumes may still be staged
// below the used ones.
func NewPrivatePaths(kubeletRoot, dir string, used ...string) *PrivatePaths {
	return &PrivatePaths{kubeletRoot, dir, slices.DeleteFunc(slices.Clone(used), func(one string) bool { return one == dir })}
}

// hashOf hashes driver, volume and path. In hexadecimal, two requests cannot have one hash.
func hashOf(id VolumeID, where string) [sha256.Size]byte {
	return sha256.Sum256(fmt.Appendf(nil, "%x/%x/%x/", id.Driver, id.ID, where))
}

// Staging names the private staging directory for kubelet's staging path.
func (p *PrivatePaths) Staging(id VolumeID, kubeletPath string) string {
	return p.find(stagingDir, id, kubeletPath)
}

// Publish names the private publish path for kubelet's target path: by the pod's UID, as kubelet does.
func (p *PrivatePaths) Publish(id VolumeID, target string) string {
	return path.Join(p.find(publishDir, id, target), cmp.Or(kubelet.PodOf(target), deviceName))
}

// find returns the directory of a volume, or where an earlier configuration has staged or published it, because the
// driver must unstage or unpublish it there. If that directory cannot be examined it is returned too: its next user
// gets the error. Its name looks like that of a provisioned persistent volume, because some drivers search for such
// names. It ends with a hyphen, which no persistent volume's name does, so kubelet never creates the same directory.
func (p *PrivatePaths) find(kind string, id VolumeID, where string) string {
	sum := hashOf(id, where)
	name := fmt.Sprintf("pvc-%x-%x-%x-%x-%x-", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
	for _, dir := range p.used {
		earlier := path.Join(dir, kind, name)
		if there, err := p.Exists(earlier); there || err != nil {
			return earlier
		}
	}
	return path.Join(p.dir, kind, name)
}

// Published reports whether a driver was ever asked for a device for kubelet's target path,
// and has not unpublished it since.
func (p *PrivatePaths) Published(id VolumeID, target string) (bool, error) {
	return p.Exists(path.Dir(p.Publish(id, target)))
}

// MakeDir makes a private directory. The tree belongs to root, but driver
// containers can write to it: no link may lead out of the kubelet root.
func (p *PrivatePaths) MakeDir(dir string) error {
	return p.inRoot(dir, func(root *os.Root, rel string) error {
		if err := root.MkdirAll(rel, 0o750); err != nil {
			return volume.Errorf(volume.DiskKind(err), "the private directory %s cannot be made: %w", dir, err)
		}
		return nil
	})
}

// lstat returns nil if nothing of ours is there. The error of a link that leads out of the kubelet root, which has no
// errno, proves that too: MakeDir follows no such link.
func (p *PrivatePaths) lstat(where string) (info fs.FileInfo, err error) {
	err = p.inRoot(where, func(root *os.Root, rel string) (err error) {
		info, err = root.Lstat(rel)
		return err
	})
	errno, known := errors.AsType[syscall.Errno](err)
	if err == nil || !known || slices.Contains([]syscall.Errno{unix.ENOENT, unix.ENOTDIR, unix.ELOOP}, errno) {
		return info, nil
	}
	return nil, volume.Errorf(volume.Busy, "it cannot be seen whether a device is at %s: %w", where, err)
}

// Exists reports whether anything is there. After an error that is not known.
func (p *PrivatePaths) Exists(where string) (bool, error) {
	info, err := p.lstat(where)
	return info != nil, err
}

// Shows reports whether a private publish path shows this block device.
func (p *PrivatePaths) Shows(where string, device volume.Device) bool {
	info, _ := p.lstat(where)
	if info == nil || device.Kind != volume.BlockDevice || info.Mode().Type() != fs.ModeDevice {
		return false // nothing, or a character device, which has one more bit
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Rdev == unix.Mkdev(device.Major, device.Minor)
}

// RemovePublish removes what is left at a private publish path, and its directory, when the driver has unpublished. A
// file with anything in it, or something mounted there, is somebody's data and stays.
func (p *PrivatePaths) RemovePublish(device string) error {
	return p.inRoot(device, func(root *os.Root, rel string) error {
		info, err := root.Lstat(rel)
		if holdsData := err == nil && info.Mode().IsRegular() && info.Size() > 0; err == nil && !holdsData {
			if err := root.Remove(rel); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return volume.Errorf(volume.Busy, "the driver has left %s, and it cannot be removed: %w", device, err)
			}
		}
		return removeEmpty(root, path.Dir(rel))
	})
}

func (p *PrivatePaths) removeStaging(dir string) error { return p.inRoot(dir, removeEmpty) }

// removeEmpty removes a directory of ours if it is empty. What a driver left in it is its own,
// and does no harm: the next stage finds it again.
func removeEmpty(root *os.Root, rel string) error {
	err := root.Remove(rel)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY):
		return nil
	default:
		return volume.Errorf(volume.Internal, "the private directory %s cannot be removed: %w", rel, err)
	}
}

// RemoveEmptyTarget removes an empty directory at a target whose record was lost, and
// reports whether nothing is there any more. Anything else there is not ours.
func (p *PrivatePaths) RemoveEmptyTarget(target string) (gone bool) {
	_ = p.inRoot(target, func(root *os.Root, rel string) error {
		info, err := root.Lstat(rel)
		gone = err != nil || info.IsDir() && root.Remove(rel) == nil
		return nil
	})
	return gone
}

// inRoot calls do with the kubelet root and a path below it.
func (p *PrivatePaths) inRoot(where string, do func(root *os.Root, rel string) error) error {
	rel, err := filepath.Rel(p.kubeletRoot, where)
	if err != nil || !filepath.IsLocal(rel) {
		return volume.Errorf(volume.Internal, "%s does not lie below the kubelet root %s", where, p.kubeletRoot)
	}
	root, err := os.OpenRoot(p.kubeletRoot)
	if err != nil {
		return volume.Errorf(volume.Internal, "the kubelet root cannot be opened: %w", err)
	}
	defer func() { _ = root.Close() }()
	return do(root, rel)
}
