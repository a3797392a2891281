package kata

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/runtimetest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestMain(m *testing.M) {
	askAgain = time.Millisecond
	goleak.VerifyTestMain(m)
}

func TestConformanceGo(t *testing.T) {
	runtimetest.Run(t, runtimetest.Fixture{New: func(t *testing.T) runtimetest.Env { return newBench(t, kataemu.Go) }})
}

func TestConformanceRust(t *testing.T) {
	runtimetest.Run(t, runtimetest.Fixture{New: func(t *testing.T) runtimetest.Env { return newBench(t, kataemu.Rust) }})
}

// bench is a handler with a node of its own around it.
type bench struct {
	*fakeSandboxes
	cfg    Config
	flavor kataemu.Flavor
	h      *Handler
	stop   func()
	resize func(string, uint64) error
}

func testConfig(dir string) Config {
	return Config{
		DirectVolumes: filepath.Join(dir, "dv"), GoSandboxes: filepath.Join(dir, "vc"), RustSandboxes: filepath.Join(dir, "rs"),
		SharedSandboxes: filepath.Join(dir, "shared"), TempDir: filepath.Join(dir, "tmp"), StateDir: filepath.Join(dir, "state"),
		Filesystems: []string{"ext4", "xfs", "btrfs"}, Disks: &fakeDisks{},
	}
}

func newBench(t testing.TB, flavor kataemu.Flavor) *bench {
	t.Helper()
	b := &bench{cfg: testConfig(check.ShortDir(t)), flavor: flavor, fakeSandboxes: &fakeSandboxes{pods: map[string][]string{}, destinations: []string{"/data"}}, stop: func() {}}
	b.start(t)
	t.Cleanup(func() { b.stop() })
	return b
}

// publishedBench has a volume that is published.
func publishedBench(t testing.TB, flavor kataemu.Flavor) (*bench, *volume.Volume) {
	t.Helper()
	b := newBench(t, flavor)
	return b, published(t, b, "a")
}

func (b *bench) start(t testing.TB) {
	t.Helper()
	h := check.Value(New(b.cfg, b.fakeSandboxes, zap.NewNop()))(t)
	b.h, b.stop = h, handlers.Run(t, h)
}

func (b *bench) Handler() runtime.Handler { return b.h }

func (b *bench) Restart(t *testing.T) runtime.Handler {
	b.stop()
	b.start(t)
	return b.h
}

func (b *bench) Volume(name string) *volume.Volume {
	return handlers.Volume(Name, name, volume.Device{Kind: volume.ImageFile, Path: "/images/" + name})
}

// published publishes the volume of this name, as it is or as change makes it.
func published(t testing.TB, b *bench, name string, change ...func(*volume.Volume)) *volume.Volume {
	t.Helper()
	v := b.Volume(name)
	for _, with := range change {
		with(v)
	}
	b.publish(t, v)
	return v
}

func (b *bench) publish(t testing.TB, v *volume.Volume) {
	t.Helper()
	check.Value(b.h.Publish(t.Context(), v))(t)
}

func (b *bench) stats(t testing.TB, v *volume.Volume) volume.Report {
	t.Helper()
	return check.Value(b.h.Stats(t.Context(), v))(t)
}

func (b *bench) sized(t testing.TB, v *volume.Volume, size int64) {
	t.Helper()
	handlers.Sized(t, v, filepath.Join(filepath.Dir(b.cfg.TempDir), filepath.Base(v.Device.Path)), size)
}

// fakeDisks is what a test says of devices.
type fakeDisks struct {
	matches   func(v *volume.Volume, bytes, inodes int64) (matches, known bool)
	condition *volume.Condition
	lacks     bool
}

func (d *fakeDisks) Matches(v *volume.Volume, bytes, inodes int64) (matches, known bool) {
	if d.matches == nil {
		return false, false
	}
	return d.matches(v, bytes, inodes)
}

func (d *fakeDisks) Condition(*volume.Volume) *volume.Condition { return d.condition }
func (d *fakeDisks) LacksGroup(*volume.Volume) bool             { return d.lacks }

func (b *bench) dir(v *volume.Volume) string {
	return filepath.Join(b.cfg.DirectVolumes, dirName(filepath.Clean(v.Target)))
}

func (b *bench) Projection(t *testing.T, v *volume.Volume) (string, bool) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.dir(v), infoName))
	check.Require(t, err == nil || os.IsNotExist(err), "%v", err)
	return string(raw), err == nil
}

func (b *bench) PublishForeign(t *testing.T, v *volume.Volume) {
	t.Helper()
	check.Must(t, os.MkdirAll(b.dir(v), 0o700))
	raw := check.Value(json.Marshal(map[string]any{
		"volume-type": "directvol", "device": v.Device.Path, "fstype": "ext4", "metadata": nil, "options": []string{},
	}))(t)
	check.Must(t, os.WriteFile(filepath.Join(b.dir(v), infoName), raw, 0o600))
}

func (b *bench) LeaveHalfPublished(t *testing.T, v *volume.Volume) {
	t.Helper()
	check.Value(b.h.store.Tree.Build(v.Key, []byte("{")))(t)
	check.Must(t, os.WriteFile(filepath.Join(b.cfg.TempDir, "half"), nil, 0o600))
}

func (b *bench) CountLeftovers(t *testing.T) int {
	t.Helper()
	return handlers.CountFiles(t, b.cfg.TempDir)
}

func (b *bench) Start(t *testing.T, v *volume.Volume, id string) runtimetest.Sandbox {
	t.Helper()
	return b.startShim(t, v, id)
}

// filesystem is one of a guest, which the node has nothing like.
func filesystem(bytes, inodes uint64) kataemu.Statfs {
	return func() (unix.Statfs_t, error) {
		return unix.Statfs_t{Bsize: 4096, Blocks: bytes / 4096, Bfree: bytes / 8192, Files: inodes, Ffree: inodes / 2}, nil
	}
}

func (b *bench) startShim(t testing.TB, v *volume.Volume, id string) *sandbox {
	t.Helper()
	opts := kataemu.Options{Flavor: b.flavor, SandboxID: id, Sandboxes: b.cfg.GoSandboxes, Resize: b.resize, Mounts: map[string]kataemu.Statfs{
		v.Device.Path: filesystem(64<<20, 16384),
	}}
	if b.flavor == kataemu.Rust {
		guest := check.Value(kataemu.ShareDir(b.cfg.SharedSandboxes, guestShared, id, "dev"+id, "/data"))(t)
		opts.Sandboxes, opts.Shared = b.cfg.RustSandboxes, b.cfg.SharedSandboxes
		opts.Mounts = map[string]kataemu.Statfs{guest: filesystem(64<<20, 16384)}
	}
	shim := check.Value(kataemu.Start(opts))(t)
	s := &sandbox{Shim: shim, id: id, bench: b}
	t.Cleanup(func() { _ = shim.Stop() })
	b.add(v.PodUID, id)
	if b.flavor == kataemu.Go {
		check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, id))
	} else {
		b.h.SandboxAdded(v.PodUID, id)
	}
	return s
}

type sandbox struct {
	*kataemu.Shim
	id    string
	bench *bench
}

func (s *sandbox) Hang()   { s.SetFault(kataemu.Hang) }
func (s *sandbox) Refuse() { s.SetFault(kataemu.ServerError) }
func (s *sandbox) Babble() { s.SetFault(kataemu.WrongJSON) }
func (s *sandbox) Resume() { s.SetFault(kataemu.NoFault) }

func (s *sandbox) Kill(t *testing.T) {
	t.Helper()
	check.Must(t, s.Shim.Kill())
	s.bench.remove(s.id)
}

// fakeSandboxes is a container runtime. It never tells that a sandbox ended: the handler must find that by itself.
type fakeSandboxes struct {
	mu           sync.Mutex
	pods         map[string][]string
	destinations []string
	mounting     map[string]string // sandbox by mount source
	unread       map[string]error  // why it cannot be told what a sandbox mounts
	// elsewhere are the destinations of other sources than every volume's.
	elsewhere  map[string][]string
	containers []string
	err        error
	away       error // why it is not followed, or nil
	// ended are sandboxes in memory that the runtime, when it is asked, does not list any more; unasked is
	// why it cannot be asked, or nil.
	ended   map[string]bool
	unasked error
}

func (f *fakeSandboxes) add(pod, id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pods[pod] = append([]string{id}, f.pods[pod]...)
}

func (f *fakeSandboxes) remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pod, ids := range f.pods {
		f.pods[pod] = slices.DeleteFunc(slices.Clone(ids), func(have string) bool { return have == id })
	}
}

// setAway has the container runtime away, or back where err is nil.
func (f *fakeSandboxes) setAway(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away = err
}

func (f *fakeSandboxes) OfPod(pod string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pods[pod]
}

func (f *fakeSandboxes) PodOf(id string) (string, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pod, ids := range f.pods {
		if slices.Contains(ids, id) {
			return pod, true
		}
	}
	return "", false
}

func (f *fakeSandboxes) Listed(context.Context, ...string) (map[string]bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ids := make(map[string]bool)
	for _, of := range f.pods {
		for _, id := range of {
			ids[id] = !f.ended[id]
		}
	}
	return ids, errors.Join(f.away, f.unasked)
}

func (f *fakeSandboxes) Destinations(_ context.Context, _, source string) ([]string, error) {
	if other, ok := f.elsewhere[source]; ok {
		return other, f.err
	}
	return f.destinations, f.err
}

func (f *fakeSandboxes) ContainerIDs(context.Context, string) ([]string, error) {
	return f.containers, f.err
}

func (f *fakeSandboxes) Mounting(_ context.Context, sources ...string) (ids []string, unread map[string]error, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, source := range sources {
		if id, mounted := f.mounting[source]; mounted {
			ids = append(ids, id)
		}
	}
	return ids, f.unread, f.err
}

func (f *fakeSandboxes) Ready() bool { return f.LastError() == nil }

func (f *fakeSandboxes) LastError() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.away
}
