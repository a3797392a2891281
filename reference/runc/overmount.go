package runc

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// overmount puts a detached mount over a directory, for this mount namespace
// alone: the mount that the directory lies on is cut off from its peers first, or
// the host and every other namespace would get the volume too.
func overmount(mount, over int) error {
	if err := cutOff(over); err != nil {
		return fmt.Errorf("the place of the volume cannot be cut off from the host: %w", err)
	}
	if err := moveMount(mount, over); err != nil {
		return fmt.Errorf("the volume cannot be put in its place: %w", err)
	}
	return nil
}

func moveMount(mount, over int) error {
	return unix.MoveMount(mount, "", over, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// cutOff keeps the host and other namespaces from seeing what is mounted on the mount that
// a descriptor lies on, and believes only what the kernel says about it afterwards. A mount
// of which the descriptor is not the root can show more than the volume's place: it still
// follows the host, for containers with mountPropagation HostToContainer.
func cutOff(fd int) error {
	isRoot, err := isMounted(fd)
	if err != nil {
		return err
	}
	root, propagation := fd, uint64(unix.MS_PRIVATE)
	if !isRoot {
		if root, err = rootOfMount(fd); err != nil {
			return err
		}
		defer func() { _ = unix.Close(root) }()
		propagation = unix.MS_SLAVE
	}
	attr := unix.MountAttr{Propagation: propagation}
	if err := unix.MountSetattr(root, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return err
	}
	entry, err := mountEntry(fd)
	if err != nil {
		return err
	}
	if strings.Contains(entry.Optional, "shared:") {
		return fmt.Errorf("%s still shares its mounts (%s)", entry.Mountpoint, entry.Optional)
	}
	return nil
}

// rootOfMount opens the root of the mount that a descriptor lies on.
func rootOfMount(fd int) (int, error) {
	entry, err := mountEntry(fd)
	if err != nil {
		return -1, err
	}
	root, err := unix.Open(entry.Mountpoint, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	id, err := mountID(root)
	if err == nil && id != entry.ID {
		err = fmt.Errorf("something else is mounted over %s", entry.Mountpoint)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(root))
	}
	return root, nil
}

func mountID(fd int) (int, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st)
	return int(st.Mnt_id), err //nolint:gosec // the kernel's ids are ints
}

// mountEntry is the kernel's line about the mount that a descriptor lies on.
func mountEntry(fd int) (*mountinfo.Info, error) {
	id, err := mountID(fd)
	if err != nil {
		return nil, err
	}
	// This thread has a mount namespace of its own, which the process has not.
	file, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	entries, err := mountinfo.GetMountsFromReader(file, func(m *mountinfo.Info) (skip, stop bool) {
		return m.ID != id, m.ID == id
	})
	if err != nil {
		return nil, err
	}
	if len(entries) != 1 {
		return nil, fmt.Errorf("the mount %d is not listed", id)
	}
	return entries[0], nil
}

// restrict gives runc what the volumes' options take away, such as nosuid: runc mounts the
// sources anew with the options of the spec alone. Only in this thread's mount namespace
// config.json is another file.
func (c *creator) restrict(spec *specs.Spec, found []*oci.Mount) error {
	wanted := make(map[int][]string)
	for _, m := range found {
		options, err := fsmount.Restrictions(m.Info)
		if err != nil {
			return handler.VolumeError(m, err)
		}
		if len(options) > 0 {
			wanted[m.Index] = append(slices.Clone(spec.Mounts[m.Index].Options), options...)
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	name := filepath.Join(c.in.Bundle, handler.SpecFile)
	raw, err := os.ReadFile(name) //nolint:gosec // what runc itself reads
	if err == nil {
		raw, err = withOptions(raw, wanted)
	}
	if err == nil {
		err = c.replace(name, raw)
	}
	if err != nil {
		return fmt.Errorf("runc cannot be given the mount options of the volumes: %w", err)
	}
	return nil
}

// withOptions replaces the options of mounts in a spec, and leaves the rest as it is, also
// what only a later version of the spec knows.
func withOptions(raw []byte, wanted map[int][]string) ([]byte, error) {
	var spec map[string]json.RawMessage
	var mounts []map[string]json.RawMessage
	if err := json.Unmarshal(raw, &spec); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(spec["mounts"], &mounts); err != nil {
		return nil, err
	}
	for i, options := range wanted {
		if i >= len(mounts) {
			return nil, errors.New("its mounts have changed meanwhile: try again")
		}
		list, err := json.Marshal(options)
		if err != nil {
			return nil, err
		}
		mounts[i]["options"] = list
	}
	list, err := json.Marshal(mounts)
	if err != nil {
		return nil, err
	}
	spec["mounts"] = list
	return json.Marshal(spec)
}

// replace shows a file with this content in the place of another one. It is on a tmpfs that
// nobody else sees, and that is gone with the mount namespace.
func (c *creator) replace(name string, raw []byte) error {
	if err := os.MkdirAll(c.cfg.StateDir, 0o700); err != nil {
		return err
	}
	memory, err := fsops.NewMount("tmpfs", "tmpfs", nil, 0)
	if err != nil {
		return err
	}
	if err := overmountAt(memory, c.cfg.StateDir); err != nil {
		return err
	}
	file := filepath.Join(c.cfg.StateDir, handler.SpecFile)
	if err := os.WriteFile(file, raw, 0o600); err != nil { //nolint:gosec // by our own configuration
		return err
	}
	mount, err := unix.OpenTree(unix.AT_FDCWD, file, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	return overmountAt(mount, name)
}

// overmountAt puts a mount over a file or directory, and closes its descriptor.
func overmountAt(mount int, place string) error {
	over, err := unix.Open(place, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(overmount(mount, over), unix.Close(over))
	}
	return errors.Join(err, unix.Close(mount))
}
