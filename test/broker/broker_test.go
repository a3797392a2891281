//go:build system

package broker

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	if os.Getenv(attackerEnv) != "" {
		os.Exit(m.Run()) // the attacker is in the namespace of its victim
	}
	os.Exit(rig.Main(m))
}

// fakeRuntime is a projector that keeps its projections in memory.
type fakeRuntime struct {
	mu        sync.Mutex
	published map[volume.Key]bool
	volumes   map[volume.Key]*volume.Volume // what the projections say
	sandbox   string
	failing   func() error // is asked by Publish, if set
	retracts  func()       // is called by Retract, if set
}

func (f *fakeRuntime) Abilities() deferral.Abilities                         { return deferral.Abilities{} }
func (f *fakeRuntime) Name() string                                          { return "fake" }
func (f *fakeRuntime) Check(*volume.Volume) error                            { return nil }
func (f *fakeRuntime) InUse(context.Context, *volume.Volume) (string, error) { return f.sandbox, nil }
func (f *fakeRuntime) Orphans(known func(volume.Key) bool) ([]*volume.Volume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []*volume.Volume
	for key := range f.published {
		if v := f.volumes[key]; v != nil && !known(key) {
			out = append(out, v)
		}
	}
	return out, nil
}

func (f *fakeRuntime) Publish(ctx context.Context, v *volume.Volume) (changed bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	if f.failing != nil {
		return false, f.failing()
	}
	if f.published == nil {
		f.published = make(map[volume.Key]bool)
	}
	if f.volumes == nil {
		f.volumes = make(map[volume.Key]*volume.Volume)
	}
	f.volumes[v.Key] = v
	changed = !f.published[v.Key]
	f.published[v.Key] = true
	return changed, nil
}

func (f *fakeRuntime) Retract(_ context.Context, v *volume.Volume) error {
	if f.retracts != nil {
		f.retracts()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.published, v.Key)
	return nil
}

// node is a broker over real directories.
type node struct {
	*deferral.Broker
	t       testing.TB
	dir     string
	kubelet string
	images  string
	runtime *fakeRuntime
	cfg     deferral.Config
	// mounting is a second handler; nil where there is none.
	mounting *hostRuntime
}

// parallelNode is newNode for a test that runs beside others.
func parallelNode(t *testing.T) *node {
	t.Helper()
	t.Parallel()
	return newNode(t)
}

func newNode(t testing.TB) *node {
	t.Helper()
	dir := rig.Tmpfs(t, "mode=0755")
	n := &node{t: t, dir: dir, kubelet: filepath.Join(dir, "kubelet"), images: filepath.Join(dir, "images"), runtime: &fakeRuntime{}}
	for _, sub := range []string{n.kubelet, n.images} {
		check.Must(t, os.Mkdir(sub, 0o755))
	}
	n.cfg = deferral.Config{
		StateDir: filepath.Join(dir, "state"), Root: n.kubelet, Describe: kubelet.Describe, DefaultHandler: "fake",
		Handlers: []deferral.Projector{n.runtime},
		Devices:  claim.DevicePolicy{Roots: []string{"/dev", n.kubelet}, Images: []string{n.images}},
	}
	n.start()
	t.Cleanup(func() { n.Close() })
	return n
}

// start makes a fresh broker over the same directories, as a restart does.
func (n *node) start() {
	n.t.Helper()
	b := check.Value(deferral.NewBroker(n.cfg))(n.t)
	check.Must(n.t, b.Load(context.Background()))
	n.Broker = b
	check.Must(n.t, check.Err(b.Reconcile(context.Background())))
}

// restart forgets everything in memory.
func (n *node) restart() {
	n.t.Helper()
	n.Close()
	n.start()
}

// target makes the directory that kubelet would make for a pod's volume.
func (n *node) target(pod string) string {
	n.t.Helper()
	dir := filepath.Join(n.kubelet, "pods", pod, "volumes", "kubernetes.io~csi", "pv")
	check.Must(n.t, os.MkdirAll(dir, 0o750))
	return filepath.Join(dir, "mount")
}

func (n *node) instruction(pod, device string, flags ...string) volume.Instruction {
	return volume.Instruction{
		Type: volume.Block, Target: n.target(pod), Backing: device, FSType: "ext4", MountFlags: flags,
	}
}

func (n *node) stage(in volume.Instruction) *volume.Volume {
	n.t.Helper()
	return check.Value(n.Defer(context.Background(), in))(n.t)
}

func (n *node) unstage(target string) {
	n.t.Helper()
	check.Must(n.t, check.Err(n.Release(context.Background(), target)))
}

// noLeftovers checks that nothing of any volume is left.
func (n *node) noLeftovers() {
	n.t.Helper()
	for _, part := range []string{"volumes", "removing", "tmp", "bad"} {
		entries, err := os.ReadDir(filepath.Join(n.cfg.StateDir, part))
		check.That(n.t, err != nil || len(entries) == 0, "%s holds %v", part, entries)
	}
	check.Empty(n.t, rig.MountPoints(n.kubelet), "still mounted")
	check.That(n.t, len(n.runtime.published) == 0, "still published: %v", n.runtime.published)
	check.Empty(n.t, slices.Collect(n.Each()), "still listed")
}
