//go:build system

// Package broker tests the core on the real kernel: mounts, loop devices, other
// mount namespaces, and a process that attacks it.
package broker

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/test/harness"
)

func TestMain(m *testing.M) {
	if os.Getenv(attackerEnv) != "" {
		os.Exit(m.Run()) // the attacker is in the namespace of its victim
	}
	os.Exit(harness.Main(m))
}

// fakeRuntime is a projector that keeps its projections in memory.
type fakeRuntime struct {
	mu        sync.Mutex
	published map[deferral.Key]bool
	sandbox   string
	fail      error
}

func (f *fakeRuntime) Name() string                                            { return "fake" }
func (f *fakeRuntime) Check(*deferral.Volume) error                            { return nil }
func (f *fakeRuntime) InUse(context.Context, *deferral.Volume) (string, error) { return f.sandbox, nil }
func (f *fakeRuntime) Orphans(func(deferral.Key) bool) ([]*deferral.Volume, error) {
	return nil, nil
}

func (f *fakeRuntime) Publish(_ context.Context, v *deferral.Volume) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return f.fail
	}
	if f.published == nil {
		f.published = make(map[deferral.Key]bool)
	}
	f.published[v.Key] = true
	return nil
}

func (f *fakeRuntime) Retract(_ context.Context, v *deferral.Volume) error {
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
}

func newNode(t testing.TB) *node {
	t.Helper()
	dir := harness.Tmpfs(t, "mode=0755")
	n := &node{t: t, dir: dir, kubelet: filepath.Join(dir, "kubelet"), images: filepath.Join(dir, "images"), runtime: &fakeRuntime{}}
	for _, sub := range []string{n.kubelet, n.images} {
		must(t, os.Mkdir(sub, 0o755))
	}
	n.cfg = deferral.Config{
		StateDir: filepath.Join(dir, "state"), KubeletRoot: n.kubelet, DefaultHandler: "fake",
		Handlers: []deferral.Projector{n.runtime},
		Devices:  deferral.DevicePolicy{Roots: []string{"/dev", n.kubelet}, Images: []string{n.images}},
	}
	n.start()
	t.Cleanup(func() { n.Close() })
	return n
}

// start makes a fresh broker over the same directories, as a restart does.
func (n *node) start() {
	n.t.Helper()
	b, err := deferral.NewBroker(n.cfg)
	must(n.t, err)
	must(n.t, b.Load(context.Background()))
	n.Broker = b
	_, err = b.Reconcile(context.Background())
	must(n.t, err)
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
	must(n.t, os.MkdirAll(dir, 0o750))
	return filepath.Join(dir, "mount")
}

func (n *node) instruction(pod, device string, flags ...string) deferral.Instruction {
	return deferral.Instruction{
		Type: deferral.Block, Target: n.target(pod), Backing: device, FSType: "ext4", MountFlags: flags,
	}
}

func (n *node) stage(in deferral.Instruction) *deferral.Volume {
	n.t.Helper()
	v, err := n.Stage(context.Background(), in)
	must(n.t, err)
	return v
}

func (n *node) unstage(target string) {
	n.t.Helper()
	_, err := n.Unstage(context.Background(), target)
	must(n.t, err)
}

// wantKind checks the class of an error and that it names what it is about.
func wantKind(t *testing.T, err error, kind deferral.Kind) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want %v", kind)
	}
	if got := deferral.KindOf(err); got != kind {
		t.Fatalf("got %v: %v; want %v", got, err, kind)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// noLeftovers checks that nothing of any volume is left.
func (n *node) noLeftovers() {
	n.t.Helper()
	for _, part := range []string{"volumes", "removing", "tmp", "bad"} {
		entries, err := os.ReadDir(filepath.Join(n.cfg.StateDir, part))
		if err == nil && len(entries) > 0 {
			n.t.Errorf("%s holds %v", part, entries)
		}
	}
	if mounts := harness.MountsBelow(n.t, n.kubelet); len(mounts) > 0 {
		n.t.Errorf("still mounted: %v", mounts)
	}
	if len(n.runtime.published) > 0 {
		n.t.Errorf("still published: %v", n.runtime.published)
	}
	if all := n.List(); len(all) > 0 {
		n.t.Errorf("still listed: %v", all)
	}
}
