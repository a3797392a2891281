package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
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

func newVolume(t *trial, n *node, d *disk, pod, name string) *testVolume {
	v := &testVolume{n: n, disk: d, owner: pod, target: n.path("kubelet", "pods", pod, "volumes", "kubernetes.io~csi", name, "mount")}
	t.must(os.MkdirAll(v.target, 0o750))
	key := abi.DirName(v.target)
	v.dir = filepath.Join(n.opts.Root, key)
	v.published = volume.Volume{
		ResolvedTarget: v.target, FSType: n.opts.FSType, PodUID: pod,
		Device: volume.Device{Kind: volume.BlockDevice, Path: d.path, Major: d.major, Minor: d.minor},
	}
	err := guard.Mount(volume.Key(key), v.target)
	t.that(err == nil, "mount the guard at %s: %w", v.target, err)
	n.scratch.add(func(context.Context) error { return unmountAll(v.target) })
	n.scratch.add(func(context.Context) error { return os.RemoveAll(v.dir) })
	t.must(v.publish())
	return v
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
	if err := os.MkdirAll(v.n.opts.Root, 0o700); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(v.n.opts.Root, ".conformance-")
	if err != nil {
		return err
	}
	err = os.WriteFile(filepath.Join(temp, abi.InfoName), raw, 0o600)
	if err == nil {
		err = os.Rename(temp, v.dir)
	}
	if errors.Is(err, os.ErrExist) {
		// The directory exists: replace only the file.
		err = os.Rename(filepath.Join(temp, abi.InfoName), filepath.Join(v.dir, abi.InfoName))
	}
	return errors.Join(err, os.RemoveAll(temp))
}

func (v *testVolume) publishOdd(t *trial, change func(*abi.Info)) {
	raw, err := abi.Encode(&v.published)
	t.must(err)
	var info abi.Info
	t.must(json.Unmarshal(raw, &info))
	change(&info)
	raw, err = json.Marshal(info)
	t.must(err)
	t.must(v.publishRaw(raw))
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
func (v *testVolume) bindSub(t *trial, sub string) (place string) {
	inside := filepath.Join(v.target, sub)
	t.must(os.MkdirAll(inside, 0o750))
	v.n.count++
	place = v.n.path("kubelet", "pods", v.owner, "volume-subpaths", "pv", "main", fmt.Sprint(v.n.count))
	t.must(os.MkdirAll(place, 0o750))
	fd, err := unix.Open(inside, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	t.must(err)
	defer func() { _ = unix.Close(fd) }()
	err = unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), place, "", unix.MS_BIND, "")
	t.that(err == nil, "bind %s: %w", inside, err)
	v.n.scratch.add(func(context.Context) error { return unmountAll(place) })
	return place
}

// handlerFiles are the files that the handler left in the directory.
func (v *testVolume) handlerFiles(t *trial) map[string][]byte {
	entries, err := os.ReadDir(v.dir)
	t.must(err)
	files := make(map[string][]byte)
	for _, entry := range entries {
		if entry.Name() != abi.InfoName {
			files[entry.Name()], err = os.ReadFile(filepath.Join(v.dir, entry.Name()))
			t.must(err)
		}
	}
	return files
}

// putBack restores files of the handler. It is free to have removed them.
func (v *testVolume) putBack(t *trial, files map[string][]byte) {
	dir, err := v.open()
	t.must(err)
	defer func() { _ = dir.Close() }()
	err = dir.Lock(time.Second)
	for name, content := range files {
		if _, statErr := os.Lstat(filepath.Join(v.dir, name)); statErr == nil {
			continue
		}
		err = errors.Join(err, dir.Put(name, content))
	}
	t.must(errors.Join(err, dir.Unlock()))
}

// hasBinding checks the files that the handler left in the volume's directory.
func (v *testVolume) hasBinding(t *trial, sandbox string) {
	dir, err := v.open()
	t.must(err)
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	t.must(err)
	t.that(slices.Equal(ids, []string{sandbox}), "the files named by sandboxes are %q and should be %q alone", ids, sandbox)
	_, err = dir.Line(abi.CLIName)
	t.must(err)
	for name := range v.handlerFiles(t) {
		known := []string{sandbox, abi.CLIName, abi.SocketName}
		t.that(slices.Contains(known, name), "there is a file %q, which has no meaning", name)
	}
}

// namesProgram opens the program as the broker does before it runs it.
func (v *testVolume) namesProgram(t *trial) {
	path, err := v.line(abi.CLIName)
	t.must(err)
	program, err := sys.OpenProgram(path, 0)
	t.that(err == nil, "the program %s, which no symbolic link may lead to: %w", path, err)
	_ = program.Close()
}

func (v *testVolume) infoIsWhole(t *trial) {
	wanted, err := abi.Encode(&v.published)
	t.must(err)
	raw, err := os.ReadFile(filepath.Join(v.dir, abi.InfoName))
	t.must(err)
	t.that(bytes.Equal(raw, wanted), "%s was changed", abi.InfoName)
}

// settles bounds the wait for a filesystem's background writes. The calls of a slow machine take their time beside it.
const settles = time.Minute

func (f *fixture) statsAreTrue(ctx context.Context, c *container) error {
	seen := func(ctx context.Context) (seenUsage, error) { return ask[seenUsage](ctx, c, "usage", "/data") }
	return whileStill(ctx, seen, func(ctx context.Context, use seenUsage) error {
		reply, err := f.vol.stats(ctx)
		if reply.condition.GetAbnormal() {
			return fmt.Errorf("a whole volume is said to be abnormal: %q", reply.condition.GetMessage())
		}
		if err == nil && !maps.Equal(reply.usages, use.usages()) {
			err = fmt.Errorf("it answers %+v, and statfs in the sandbox gives %+v", reply.usages, use.usages())
		}
		return err
	})
}

// whileStill repeats compare until it succeeds, or fails three times with the same state
// before and after it: filesystems write in the background.
func whileStill[T comparable](ctx context.Context, see func(context.Context) (T, error), compare func(context.Context, T) error) error {
	var last error
	began := time.Now()
	for tries := 0; tries < 3 && time.Since(began) < settles; {
		before, err := see(ctx)
		if err != nil {
			return errors.Join(last, err)
		}
		last = compare(ctx, before)
		after, err := see(ctx)
		if last == nil || err != nil {
			return err
		}
		if before == after {
			tries++
		}
	}
	return last
}

// usages are the stats that the handler should give.
func (u seenUsage) usages() usages {
	size := func(blocks uint64) int64 { return int64(blocks) * u.Unit } //nolint:gosec // a small disk
	all := usages{runtimev1.VolumeUsage_BYTES: {Total: size(u.Blocks), Used: size(u.Blocks - u.Free), Available: size(u.Avail)}}
	if u.Files > 0 {
		//nolint:gosec // a small disk
		all[runtimev1.VolumeUsage_INODES] = amounts{Total: int64(u.Files), Used: int64(u.Files - u.FFree), Available: int64(u.FFree)}
	}
	return all
}

type amounts struct{ Total, Used, Available int64 }

type usages map[runtimev1.VolumeUsage_Unit]amounts

// stats is what the broker takes from an answer to stats.
type stats struct {
	usages    usages
	condition *runtimev1.VolumeCondition
}

// statsOf leaves out units that the broker ignores, and inodes that are not counted.
func statsOf(reply *handlerv1.GetVolumeStatsResponse) (stats, error) {
	s := stats{usages: make(usages), condition: reply.GetVolumeCondition()}
	for _, u := range reply.GetUsage() {
		unit, is := u.GetUnit(), amounts{u.GetTotal(), u.GetUsed(), u.GetAvailable()}
		if unit != runtimev1.VolumeUsage_BYTES && (unit != runtimev1.VolumeUsage_INODES || is == amounts{}) {
			continue
		}
		if _, twice := s.usages[unit]; twice {
			return s, fmt.Errorf("it answers with two usages in %s", unit)
		}
		s.usages[unit] = is
	}
	return s, nil
}

func (s stats) String() string {
	c := s.condition
	return fmt.Sprintf("%+v, condition: %t, abnormal: %t, message: %q, reason: %q", s.usages, c != nil, c.GetAbnormal(), c.GetMessage(), c.GetReason())
}

func (f *fixture) statsAreSane(t *trial) {
	reply, err := f.vol.stats(t.ctx)
	t.must(err)
	t.that(len(reply.usages) > 0, "it answers without any usage")
	for unit, u := range reply.usages {
		possible := u.Total > 0 && min(u.Used, u.Available) >= 0 && max(u.Used, u.Available) <= u.Total
		t.that(possible, "it answers %+v in %s, which cannot be", u, unit)
		t.that(unit != runtimev1.VolumeUsage_BYTES || u.Total <= diskSize, "it answers %+v, of a device of %d bytes", u, diskSize)
	}
}

func (f *fixture) badArguments(t *trial) {
	target := f.vol.target
	for _, words := range [][]string{
		{}, {abi.Stats}, {abi.Stats, "mount"}, {abi.Stats, target, "more"}, {abi.Resize, target}, {abi.Resize, target, "1", "many"},
		{abi.Resize, target, "-1", "0"}, {abi.Freeze, target}, {abi.Freeze, target, "soon"}, {"no-such-word", target},
	} {
		if err := f.vol.wantExit(t.ctx, abi.ExitUsage, words...); !errors.As(err, new(unsupported)) {
			t.must(err)
		}
	}
}
