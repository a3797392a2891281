package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// testVolume is a published volume, as the broker leaves it.
type testVolume struct {
	n         *node
	disk      *disk
	owner     string // the pod's UID
	target    string
	dir       string        // of the ABI
	published volume.Volume // what the broker says of it
}

// newVolume publishes a volume of a pod on a disk.
func newVolume(n *node, d *disk, pod, name string) (*testVolume, error) {
	v := &testVolume{n: n, disk: d, owner: pod, target: n.path("kubelet", "pods", pod, "volumes", "kubernetes.io~csi", name, "mount")}
	if err := os.MkdirAll(v.target, 0o750); err != nil {
		return nil, err
	}
	key := abi.DirName(v.target)
	v.dir = filepath.Join(n.opts.Root, key)
	v.published = volume.Volume{
		ResolvedTarget: v.target, FSType: n.opts.FSType, PodUID: pod,
		Device: volume.Device{Kind: volume.BlockDevice, Path: d.path, Major: d.major, Minor: d.minor},
	}
	if err := guard.Mount(volume.Key(key), v.target); err != nil {
		return nil, fmt.Errorf("mount the guard at %s: %w", v.target, err)
	}
	n.scratch.add(func(context.Context) error { return unmountAll(v.target) })
	n.scratch.add(func(context.Context) error { return os.RemoveAll(v.dir) })
	return v, v.publish()
}

// publish writes mountInfo.json as the broker does.
func (v *testVolume) publish() error {
	raw, err := abi.Encode(&v.published)
	if err != nil {
		return err
	}
	return v.publishRaw(raw)
}

func (v *testVolume) publishRaw(raw []byte) error {
	temp, err := os.MkdirTemp(v.n.opts.Root, ".conformance-")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(temp, abi.InfoName), raw, 0o600); err != nil {
		return errors.Join(err, os.RemoveAll(temp))
	}
	err = os.Rename(temp, v.dir)
	if errors.Is(err, os.ErrExist) {
		// The directory exists: replace only the file.
		err = os.Rename(filepath.Join(temp, abi.InfoName), filepath.Join(v.dir, abi.InfoName))
	}
	return errors.Join(err, os.RemoveAll(temp))
}

// publishOdd publishes a mountInfo.json with a change.
func (v *testVolume) publishOdd(change func(*abi.Info)) error {
	raw, err := abi.Encode(&v.published)
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

// unpublish removes the directory, but not the guard.
func (v *testVolume) unpublish() error { return os.RemoveAll(v.dir) }

// unbind removes the files of dead sandboxes, as the broker does.
func (v *testVolume) unbind() error {
	entries, err := os.ReadDir(v.dir)
	for _, entry := range entries {
		if entry.Name() != abi.InfoName {
			err = errors.Join(err, os.Remove(filepath.Join(v.dir, entry.Name())))
		}
	}
	return err
}

// open opens the directory as the broker does.
func (v *testVolume) open() (*abi.Dir, error) { return abi.Open(v.n.opts.Root, filepath.Base(v.dir)) }

// line reads a file of one line that the handler left in the directory.
func (v *testVolume) line(name string) (string, error) {
	dir, err := v.open()
	if err != nil {
		return "", err
	}
	defer func() { _ = dir.Close() }()
	return dir.Line(name)
}

// covered fails if the host sees anything but the guard at the target.
func (v *testVolume) covered() error {
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
// subPath: through a descriptor, at another path.
func (v *testVolume) bindSub(sub string) (place string, err error) {
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
	v.n.scratch.add(func(context.Context) error { return unmountAll(place) })
	return place, nil
}

// handlerFiles are the files that the handler left in the directory.
func (v *testVolume) handlerFiles() (map[string][]byte, error) {
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return nil, err
	}
	files := make(map[string][]byte)
	for _, entry := range entries {
		if entry.Name() == abi.InfoName {
			continue
		}
		if files[entry.Name()], err = os.ReadFile(filepath.Join(v.dir, entry.Name())); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// putBack restores files of the handler. It is free to have removed them.
func (v *testVolume) putBack(files map[string][]byte) error {
	dir, err := v.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	err = dir.Lock(time.Second)
	for name, content := range files {
		if _, statErr := os.Lstat(filepath.Join(v.dir, name)); statErr == nil {
			continue
		}
		err = errors.Join(err, dir.Put(name, content))
	}
	return errors.Join(err, dir.Unlock())
}

// hasBinding checks the files that the handler left in the volume's directory.
func (v *testVolume) hasBinding(sandbox string) error {
	dir, err := v.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err != nil {
		return err
	}
	if !slices.Equal(ids, []string{sandbox}) {
		return fmt.Errorf("the files named by sandboxes are %q and should be %q alone", ids, sandbox)
	}
	if _, err := dir.Line(abi.CLIName); err != nil {
		return err
	}
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if known := []string{sandbox, abi.InfoName, abi.CLIName, abi.SocketName}; !slices.Contains(known, entry.Name()) {
			return fmt.Errorf("there is a file %q, which has no meaning", entry.Name())
		}
	}
	return nil
}

func (v *testVolume) namesProgram() error {
	program, err := v.line(abi.CLIName)
	if err != nil {
		return err
	}
	return checkProgram(program)
}

func (v *testVolume) infoIsWhole() error {
	wanted, err := abi.Encode(&v.published)
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(filepath.Join(v.dir, abi.InfoName))
	if err == nil && !bytes.Equal(raw, wanted) {
		err = fmt.Errorf("%s was changed", abi.InfoName)
	}
	return err
}
