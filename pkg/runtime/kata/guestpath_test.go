package kata

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/fuse"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// fine stands for no error.
const fine = volume.Kind(255)

func TestGuestPath(t *testing.T) {
	const container = "c0ffee00112233445566"
	for name, c := range map[string]struct {
		dirs, files  []string
		destinations []string
		noTracker    bool
		trackerError error
		want         string
		kind         volume.Kind
	}{
		"one":               {dirs: []string{"rw/dev1-0a1b-data"}, destinations: []string{"/data"}, want: "dev1-0a1b-data", kind: fine},
		"with dashes":       {dirs: []string{"rw/dev1-0a1b-my-data"}, destinations: []string{"/x/my-data/"}, want: "dev1-0a1b-my-data", kind: fine},
		"read-only":         {dirs: []string{"ro/dev1-0a1b-data"}, destinations: []string{"/data"}, want: "dev1-0a1b-data", kind: fine},
		"in both":           {dirs: []string{"ro/dev1-0a1b-data", "rw/dev1-0a1b-data"}, destinations: []string{"/data"}, want: "dev1-0a1b-data", kind: fine},
		"none yet":          {destinations: []string{"/data"}, kind: volume.NoSandbox},
		"another's":         {dirs: []string{"rw/dev1-0a1b-other"}, destinations: []string{"/data"}, kind: volume.NoSandbox},
		"longer name":       {dirs: []string{"rw/dev1-0a1b-x-data"}, destinations: []string{"/data"}, kind: volume.NoSandbox},
		"a container's":     {dirs: []string{"rw/" + container + "-0a1b-data"}, destinations: []string{"/data"}, kind: volume.NoSandbox},
		"a container's cut": {dirs: []string{"rw/" + container[:10] + "-0a1b-data"}, destinations: []string{"/data"}, kind: volume.NoSandbox},
		"a file":            {files: []string{"rw/dev1-0a1b-data"}, destinations: []string{"/data"}, kind: volume.NoSandbox},
		"no hex":            {dirs: []string{"rw/dev1-wxyz-data"}, destinations: []string{"/data"}, kind: volume.NoSandbox},
		"control character": {dirs: []string{"rw/dev1-0a1b-da\nta"}, destinations: []string{"/da\nta"}, kind: volume.NoSandbox},
		"the newest":        {dirs: []string{"rw/dev2-0a1b-data", "rw/dev1-0a1c-data"}, destinations: []string{"/data"}, want: "dev1-0a1c-data", kind: fine},
		"no tracker":        {dirs: []string{"rw/dev1-0a1b-data"}, noTracker: true, want: "dev1-0a1b-data", kind: fine},
		"tracker fails":     {dirs: []string{"rw/dev1-0a1b-data"}, trackerError: errors.New("no containerd"), kind: volume.NoSandbox},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, kataemu.Rust)
			b.destinations, b.containers, b.err = c.destinations, []string{container}, c.trackerError
			if c.noTracker {
				b.h.sandboxes = nil
			}
			makeShared(t, filepath.Join(b.cfg.SharedSandboxes, "sb1"), c.dirs, c.files)
			v := b.Volume("a")
			search := &guestSearch{h: b.h, v: v, shim: shim{"sb1", rustShim}}
			dirs, err := search.list(t.Context())
			if len(dirs) == 0 && err == nil {
				err = search.notMounted()
			}
			if c.kind != fine {
				handlers.WantError(t, err, c.kind, v, "sb1")
				return
			}
			check.That(t, err == nil && dirs[0].name == c.want, "%v, %v, want %q first", dirs, err, c.want)
		})
	}
}

// TestManySharedDirectories: those of other volumes and of ended containers keep no volume from being found.
func TestManySharedDirectories(t *testing.T) {
	b, dirs := newBench(t, kataemu.Rust), []string{"rw/dev1-0a1b-data"}
	for i := range 4096 {
		dirs = append(dirs, fmt.Sprintf("rw/dev%d-0a1b-other", i))
	}
	makeShared(t, filepath.Join(b.cfg.SharedSandboxes, "sb1"), dirs, nil)
	search := &guestSearch{h: b.h, v: b.Volume("a"), shim: shim{"sb1", rustShim}}
	found, err := search.list(t.Context())
	check.That(t, err == nil && len(found) == 1 && found[0].name == "dev1-0a1b-data", "found %v, %v", found, err)
	most := maxShared
	t.Cleanup(func() { maxShared = most })
	maxShared = 4096
	handlers.WantError(t, check.Err(search.list(t.Context())), volume.Internal, search.v, "sb1", "listed: it has more than 4096", "delete the pod")
}

// TestSharedVolumeThatHangs: another volume of the pod that a sandbox shares is on a server that has gone, and delays nobody.
func TestSharedVolumeThatHangs(t *testing.T) {
	check.NeedsRoot(t)
	b, dir := newBench(t, kataemu.Rust), t.TempDir()
	check.Must(t, fuse.Prepare(dir))
	server := check.Value(fuse.Mount(dir, nil))(t)
	end := sync.OnceValue(server.End)
	t.Cleanup(func() { check.Must(t, end()) })
	shared := filepath.Join(b.cfg.SharedSandboxes, "sb1")
	makeShared(t, shared, []string{"rw/dev1-0a1b-data", "rw/dev2-0a1b-nfs"}, nil)
	at := filepath.Join(shared, "rw", "passthrough", "dev2-0a1b-nfs")
	check.Must(t, unix.Mount(filepath.Dir(server.File), at, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check.Must(t, unix.Unmount(at, unix.MNT_DETACH)) })
	server.Silent.Store(true)
	late := time.AfterFunc(5*time.Second, func() { _ = end() })
	search := &guestSearch{h: b.h, v: b.Volume("a"), shim: shim{"sb1", rustShim}}
	dirs, err := search.listShared()
	check.That(t, err == nil && len(dirs) == 1 && dirs[0].name == "dev1-0a1b-data", "found %v, %v", dirs, err)
	check.That(t, late.Stop(), "it waited for the server")
}

// An emptyDir of Kata's own is mounted below a path that nobody records: that is said, and
// not that no container has started.
func TestStatsOfKatasOwnEmptyDir(t *testing.T) {
	b := newBench(t, kataemu.Rust)
	v := b.Volume("cache")
	v.Target = "/var/lib/kubelet/pods/pod-cache/volumes/kubernetes.io~empty-dir/cache"
	v.Key, v.ResolvedTarget, v.Device.Path = volume.KeyOf(v.Target), v.Target, v.Target+"/disk.img"
	b.PublishForeign(t, v)
	check.Eventually(t, "adopted", func() bool { return len(b.h.Adopted()) == 1 })
	b.startShim(t, v, "sb1")
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), b.h.Adopted()[0])), volume.Unsupported, v, "emptyDir", "inside the pod")
}

func makeShared(t *testing.T, root string, dirs, files []string) {
	t.Helper()
	for _, name := range append(slices.Clone(dirs), files...) {
		path := filepath.Join(root, name[:2], "passthrough", name[3:])
		check.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		if slices.Contains(files, name) {
			check.Must(t, os.WriteFile(path, nil, 0o600))
		} else {
			check.Must(t, os.Mkdir(path, 0o700))
		}
	}
}

// guest is a runtime-rs sandbox whose containers come and go.
type guestOf struct {
	*bench
	t    *testing.T
	shim *sandbox
	next int
}

func newGuest(t *testing.T, size int64) (*guestOf, *volume.Volume) {
	b := newBench(t, kataemu.Rust)
	volume := b.Volume("a")
	b.sized(t, volume, size)
	b.publish(t, volume)
	g := &guestOf{bench: b, t: t, shim: b.startShim(t, volume, "sb1")}
	g.end(guestShared + "devsb1-0123abcd-data")
	check.Must(t, os.Remove(filepath.Join(b.cfg.SharedSandboxes, "sb1", "rw", "passthrough", "devsb1-0123abcd-data")))
	return g, volume
}

// start mounts a filesystem for a container, at a path that is new each time.
func (g *guestOf) start(fs kataemu.Statfs) (path string) {
	g.t.Helper()
	g.next++
	path = check.Value(kataemu.ShareDir(g.cfg.SharedSandboxes, guestShared, "sb1", fmt.Sprintf("dev%03d", 999-g.next), "/data"))(g.t)
	g.shim.Mount(path, fs)
	return path
}

// end unmounts it, and leaves the directory as runtime-rs does.
func (g *guestOf) end(path string) { g.shim.UnmountOne(path) }

func (g *guestOf) wantStats(v *volume.Volume, bytes int64) {
	g.t.Helper()
	report := check.Value(g.h.Stats(g.t.Context(), v))(g.t)
	got, _ := totals(report)
	check.That(g.t, got == bytes && report.Sandbox == "sb1", "stats of %d bytes of sandbox %q, want %d", got, report.Sandbox, bytes)
}

// The path of an ended container answers with the numbers of the node's own filesystem, which may be larger or smaller
// than the volume. They are never the volume's.
func TestStatsAfterAContainerEnded(t *testing.T) {
	var st unix.Statfs_t
	check.Must(t, unix.Statfs(os.TempDir(), &st))
	node := int64(st.Blocks) * st.Bsize
	for name, device := range map[string]int64{"smaller than the node's": 64 << 20, "larger than the node's": 2 * node} {
		t.Run(name, func(t *testing.T) {
			g, v := newGuest(t, device)
			initial := g.start(filesystem(60<<20, 1000))
			g.wantStats(v, 60<<20)
			g.end(initial)
			handlers.WantError(t, check.Err(g.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "does not have it mounted now")
			app := g.start(filesystem(61<<20, 1000))
			g.wantStats(v, 61<<20)

			// Our own restart forgets which path it was.
			g.Restart(t)
			g.publish(t, v)
			g.wantStats(v, 61<<20)
			g.end(app)
			handlers.WantError(t, check.Err(g.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "does not have it mounted now")
		})
	}
}

// An old container that still runs is found below many that have ended.
func TestStatsBesideAContainerThatCrashes(t *testing.T) {
	g, v := newGuest(t, 1<<30)
	g.start(filesystem(60<<20, 1000))
	for range 2*maxAsked - 1 {
		g.end(g.start(filesystem(61<<20, 1000)))
	}
	handlers.WantError(t, check.Err(g.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1") // and no more than a bounded number was asked for
	// A minute later they are left out for good.
	settled = 0
	t.Cleanup(func() { settled = time.Minute })
	handlers.WantError(t, check.Err(g.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1")
	g.wantStats(v, 60<<20)
}

// A clock that was set forward makes a directory old in which the guest is about to mount.
func TestStatsAfterTheClockWasSet(t *testing.T) {
	g, v := newGuest(t, 1<<30)
	settled = time.Millisecond
	t.Cleanup(func() { settled = time.Minute })
	path := g.start(filesystem(60<<20, 1000))
	g.end(path)
	time.Sleep(50 * time.Millisecond)
	handlers.WantError(t, check.Err(g.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1")
	g.shim.Mount(path, filesystem(60<<20, 1000))
	g.wantStats(v, 60<<20)
}

// Two volumes of a pod with mount paths that end alike are told apart by their sizes, or not at all.
func TestStatsOfVolumesThatEndAlike(t *testing.T) {
	for name, c := range map[string]struct {
		sizes  [2]int64 // of the devices
		inodes [2]int64 // on the devices; 0 where that is not known
		mounts [2]uint64
		only   int // which one is mounted alone
		want   [2]volume.Kind
	}{
		"known filesystems":      {sizes: [2]int64{64 << 20, 640 << 20}, inodes: [2]int64{1000, 2000}, mounts: [2]uint64{60 << 20, 600 << 20}, only: -1, want: [2]volume.Kind{fine, fine}},
		"only the other":         {sizes: [2]int64{64 << 20, 64 << 20}, inodes: [2]int64{1000, 2000}, mounts: [2]uint64{60 << 20, 60 << 20}, only: 1, want: [2]volume.Kind{volume.NoSandbox, fine}},
		"not grown":              {sizes: [2]int64{64 << 20, 640 << 20}, inodes: [2]int64{1000, 1000}, mounts: [2]uint64{60 << 20, 60 << 20}, only: -1, want: [2]volume.Kind{volume.Unsupported, volume.Unsupported}},
		"too large for one":      {sizes: [2]int64{64 << 20, 640 << 20}, mounts: [2]uint64{60 << 20, 600 << 20}, only: 1, want: [2]volume.Kind{volume.NoSandbox, fine}},
		"nothing known, and any": {sizes: [2]int64{640 << 20, 640 << 20}, mounts: [2]uint64{60 << 20, 600 << 20}, only: -1, want: [2]volume.Kind{volume.Unsupported, volume.Unsupported}},
	} {
		t.Run(name, func(t *testing.T) {
			g, first := newGuest(t, c.sizes[0])
			second := g.Volume("a")
			second.Target += "-other"
			second.ResolvedTarget, second.Key = second.Target, volume.KeyOf(second.Target)
			second.Device.Path += "-other"
			g.sized(t, second, c.sizes[1])
			g.publish(t, second)
			g.h.SandboxAdded(second.PodUID, "sb1")
			inodesOf := map[volume.Key]int64{first.Key: c.inodes[0], second.Key: c.inodes[1]}
			g.h.cfg.Disks = &fakeDisks{matches: func(v *volume.Volume, _, inodes int64) (bool, bool) {
				return inodesOf[v.Key] == inodes, inodesOf[v.Key] != 0
			}}
			for i := range 2 {
				if c.only < 0 || c.only == i {
					g.start(filesystem(c.mounts[i], uint64(max(c.inodes[i], 1))))
				}
			}
			for i, v := range []*volume.Volume{first, second} {
				if c.want[i] == fine {
					g.wantStats(v, int64(c.mounts[i]))
					continue
				}
				handlers.WantError(t, check.Err(g.h.Stats(t.Context(), v)), c.want[i], v, "sb1")
			}
		})
	}
}

// Another volume whose mount path ends otherwise is no reason to doubt.
func TestStatsOfVolumesThatEndOtherwise(t *testing.T) {
	g, v := newGuest(t, 1<<30)
	other := g.Volume("a")
	other.Target += "-other"
	other.ResolvedTarget, other.Key = other.Target, volume.KeyOf(other.Target)
	g.publish(t, other)
	g.elsewhere = map[string][]string{other.Target: {"/srv"}}
	g.start(filesystem(60<<20, 1000))
	g.wantStats(v, 60<<20)
}

// Without a tracker nobody knows of a runtime-rs sandbox, and the error says so.
func TestRustNeedsTracker(t *testing.T) {
	h := check.Value(New(testConfig(check.ShortDir(t)), nil, zap.NewNop()))(t)
	v := plainVolume()
	check.Value(h.Publish(t.Context(), v))(t)
	handlers.WantError(t, check.Err(h.Stats(t.Context(), v)), volume.NoSandbox, v, "container runtime is not followed")
}
