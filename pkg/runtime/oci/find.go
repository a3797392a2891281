package oci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// Config has the paths that Find reads. Its zero value has a node's default paths.
type Config struct {
	// Root holds the directories of volumes, /run/crust unless set.
	Root string
	// MountInfo is the kernel's mount table, that of this thread unless set.
	MountInfo string
}

// Mount is one mount of a container that is to show a deferred volume.
type Mount struct {
	// Index is its index in the mounts of the spec, Destination where the container sees it.
	Index       int
	Destination string
	// Volume is the key of the volume, the name of its directory.
	Volume string
	// Info describes what to mount, and how.
	Info abi.Info
	// Sub is the sub-directory of the volume to show, "" for all of it. It may not exist in
	// the volume yet: kubelet made it only in the guard.
	Sub string
	// ReadOnly is set if this container may only read, even if the volume is writable.
	ReadOnly bool
	// Source is an O_PATH descriptor of the bind mount's source, for runtimes that mount over it.
	Source int
	// Guarded is false if the volume was found by its path alone.
	Guarded bool

	dir *abi.Dir
}

// Close closes the descriptors. A second call is an error.
func (m *Mount) Close() error {
	source := m.Source
	m.Source = -1
	return errors.Join(unix.Close(source), m.dir.Close())
}

// Dir returns the volume's directory.
func (m *Mount) Dir() *abi.Dir { return m.dir }

// Errors that callers can distinguish.
var (
	// ErrNoDirectory: there is a guard, but no directory of the broker's. The volume was not
	// handed to this kind of runtime, or has been retracted.
	ErrNoDirectory = errors.New("the volume is not published to this runtime")
	// ErrOtherPod: the volume belongs to another pod.
	ErrOtherPod = errors.New("the volume belongs to another pod")
	// ErrTwoRuntimes: the container has the annotations of two container runtimes, so its sandbox is not known.
	ErrTwoRuntimes = errors.New("its annotations are of containerd and of CRI-O, and a pod's author can write those of the " +
		"one that is not there: remove io.kubernetes.cri.* and io.kubernetes.cri-o.* from the pod's annotations")
	// ErrType: this version does not know the type of the volume, and could do harm.
	ErrType = errors.New("the volume's type is not known")
)

// Find finds the deferred volumes among the mounts of a container. podUID is the container's
// pod: a volume of another one is an error. The caller closes what is found.
func Find(cfg Config, spec *specs.Spec, podUID string) (found []*Mount, err error) {
	cfg.Root, cfg.MountInfo = cmp.Or(cfg.Root, abi.DefaultRoot), cmp.Or(cfg.MountInfo, "/proc/thread-self/mountinfo")
	if !slices.ContainsFunc(spec.Mounts, isBind) {
		return nil, nil
	}
	known, err := readGuards(cfg.MountInfo)
	if err != nil {
		return nil, fmt.Errorf("the guards of deferred volumes cannot be found: %w", err)
	}
	defer func() {
		if err != nil {
			for _, m := range found {
				_ = m.Close()
			}
			found = nil
		}
	}()
	for i, mount := range spec.Mounts {
		if !isBind(mount) {
			continue
		}
		m, err := cfg.findOne(known, mount, podUID)
		if err != nil {
			return found, fmt.Errorf("the mount of %s at %s: %w", mount.Source, mount.Destination, err)
		}
		if m != nil {
			m.Index = i
			found = append(found, m)
		}
	}
	if len(found) > 0 && ofTwoRuntimes(spec.Annotations) {
		return found, ErrTwoRuntimes
	}
	return found, nil
}

func isBind(m specs.Mount) bool {
	return path.IsAbs(m.Source) &&
		(m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind"))
}

// findOne returns nil for a mount that is no deferred volume.
func (c Config) findOne(known guards, mount specs.Mount, podUID string) (*Mount, error) {
	source, err := unix.Open(mount.Source, unix.O_PATH|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EINTR):
		return nil, err // the runtime may not get this error, and would show the guard
	case err != nil:
		return nil, nil //nolint:nilerr // the runtime opens it again, and reports what is wrong
	}
	readOnly := slices.Contains(mount.Options, "ro") || slices.Contains(mount.Options, "rro")
	m := &Mount{Source: source, Destination: mount.Destination, ReadOnly: readOnly}
	ours, err := c.fill(m, known, mount.Source, podUID)
	if err != nil || !ours {
		_ = unix.Close(source)
		return nil, err
	}
	return m, nil
}

func (c Config) fill(m *Mount, known guards, source, podUID string) (ours bool, err error) {
	id, isRoot, err := mountOf(m.Source)
	if err != nil {
		return false, err
	}
	if at, guarded := known[id]; guarded {
		m.Guarded = true
		return true, c.byGuard(m, at, isRoot, source, podUID)
	}
	return c.byPath(m, podUID)
}

// byGuard identifies the volume by the guard mount that the source lies on.
func (c Config) byGuard(m *Mount, at guard, isRoot bool, source, podUID string) error {
	if at.gone {
		return errors.New("its sub-directory was removed while the pod was being set up: try again")
	}
	if !isRoot {
		// It is a path into a guard, and not a bind mount of its own: the mount alone does not say where it leads.
		rest, err := below(m.Source, at.point)
		if err != nil {
			return err
		}
		at.sub = path.Join(at.sub, rest)
	}
	dir, err := abi.Open(c.Root, at.volume)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is the guard of a deferred volume that has no directory %s/%s: "+
			"check that crust-proxy runs, and that it hands the volume to this runtime's handler", ErrNoDirectory, source, c.Root, at.volume)
	}
	if err != nil {
		return err
	}
	m.Volume, m.Sub = at.volume, at.sub
	return m.take(dir, podUID)
}

// below returns the path of a directory from the root of the mount that it lies on. The kernel says where both are.
func below(fd int, point string) (string, error) {
	here, err := sys.PathOfFD(fd)
	if err != nil {
		return "", err
	}
	rest, inside := sys.Below(point, here)
	if !inside || strings.HasSuffix(rest, " (deleted)") {
		return "", errors.New("its place in the guard is not known: try again")
	}
	return rest, nil
}

// byPath identifies the volume if a guard is missing: its target is the longest prefix of the source's real path that
// is a target. The path in the spec may contain links, such as kubelet's root.
func (c Config) byPath(m *Mount, podUID string) (bool, error) {
	clean, err := sys.PathOfFD(m.Source)
	if err != nil {
		return false, err
	}
	for target := clean; path.IsAbs(target) && target != "/"; target = path.Dir(target) {
		dir, err := abi.Open(c.Root, abi.DirName(target))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, err
		}
		m.Volume = abi.DirName(target)
		m.Sub = strings.Trim(strings.TrimPrefix(clean, target), "/")
		return true, m.take(dir, podUID)
	}
	return false, nil
}

// take reads what to mount, and checks that it is for this pod. It closes dir if it fails.
func (m *Mount) take(dir *abi.Dir, podUID string) error {
	info, err := dir.Info()
	if err == nil && info.VolumeType != abi.TypeBlock {
		err = fmt.Errorf("%w: it is %q, and this runtime handler mounts only %q: a newer one is needed", ErrType, info.VolumeType, abi.TypeBlock)
	}
	if err == nil && info.PodUID() != "" && info.PodUID() != podUID {
		err = fmt.Errorf("%w: %s is of pod %s, and this container is of pod %q", ErrOtherPod, info.Target(), info.PodUID(), podUID)
	}
	if err != nil {
		return errors.Join(err, dir.Close())
	}
	m.Info, m.dir = info, dir
	return nil
}

// guard is a guard mount, or a bind mount of a part of one.
type guard struct {
	volume string // the key of the volume that it stands for
	sub    string // the sub-directory, "" for all of it
	point  string // where it is mounted
	gone   bool   // the sub-directory was removed under the mount
}

// guards are the guard mounts of a mount namespace, by the id of the mount.
type guards map[int]guard

// deleted is what the kernel appends to the root of a mount whose directory was removed.
const deleted = "//deleted"

func readGuards(table string) (guards, error) {
	mounts, err := sys.Mounts(context.Background(), table, func(line string) bool { return strings.Contains(line, " "+abi.GuardPrefix) })
	if err != nil {
		return nil, err
	}
	found := make(guards)
	for _, m := range mounts {
		volume, ok := strings.CutPrefix(m.Source, abi.GuardPrefix)
		if !ok || m.FSType != "tmpfs" || !abi.IsDirName(volume) {
			continue
		}
		sub, gone := strings.CutSuffix(m.Root, deleted)
		found[m.ID] = guard{volume: volume, sub: strings.Trim(sub, "/"), point: m.Mountpoint, gone: gone}
	}
	return found, nil
}

// mountOf returns the id of the mount that a descriptor lies on, and whether it is the root
// of that. It does not wait for a network filesystem that hangs.
func mountOf(fd int) (id int, isRoot bool, err error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st); err != nil {
		return 0, false, err
	}
	return int(st.Mnt_id), st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil //nolint:gosec // the kernel's ids are ints
}
