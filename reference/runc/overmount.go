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

// overmount moves a detached mount over a directory, in this mount namespace only: first the
// mount below is cut off from its peers, or the volume would propagate to the host and to
// other namespaces.
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

// cutOff stops propagation from the mount of a descriptor to the host and other namespaces, and
// checks in mountinfo that it has. If the descriptor is not the root of the mount, the mount has
// other directories too: it still receives mounts from the host, for containers with
// mountPropagation HostToContainer.
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

// rootOfMount opens the root of the mount of a descriptor.
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

func mountEntry(fd int) (*mountinfo.Info, error) {
	id, err := mountID(fd)
	if err != nil {
		return nil, err
	}
	// Only this thread has this mount namespace, not the whole process.
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

// restrict adds restrictions of the volumes' mount options, such as nosuid, to the spec: runc
// mounts the sources again, with the options of the spec only. config.json is replaced in this
// thread's mount namespace only.
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

// withOptions replaces the options of mounts in a spec. It keeps everything else, also keys of
// later versions of the spec.
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

// replace mounts a file with this content over another one. It is on a tmpfs that is visible in
// this mount namespace only, and ends with it.
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
