package projection

import (
	"os"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// table holds the volumes a and b, of pod 1, and c, of pod 2, of another program.
func table() (*Bindings, func() []volume.Key) {
	var changed []volume.Key
	b := newBindings(func(key volume.Key) { changed = append(changed, key) })
	b.Track(Entry{Volume: &volume.Volume{Key: "a", PodUID: "1"}, Owner: OwnedByUs})
	b.Track(Entry{Volume: &volume.Volume{Key: "b", PodUID: "1"}, Owner: OwnedByUs})
	b.Track(Entry{Volume: &volume.Volume{Key: "c", PodUID: "2", Adopted: true}, Owner: Foreign})
	return b, func() []volume.Key {
		out := changed
		changed = nil
		slices.Sort(out)
		return out
	}
}

func wantShown(t *testing.T, b *Bindings, key volume.Key, sandbox string) {
	t.Helper()
	shown, bound := b.Shown(key)
	check.That(t, shown.Sandbox == sandbox && bound == (sandbox != ""), "%s is bound to %q (%v), not to %q", key, shown.Sandbox, bound, sandbox)
}

func wantChanged(t *testing.T, got []volume.Key, want ...volume.Key) {
	t.Helper()
	check.That(t, slices.Equal(got, want), "changes of %q are reported, not of %q", got, want)
}

func TestProposedSandboxShowsOnceItIsProven(t *testing.T) {
	b, changed := table()
	b.Propose("a", "sb1", "kind")
	wantShown(t, b, "a", "")
	wantChanged(t, changed())
	e, _ := b.Get("a")
	check.That(t, e.Live.Sandbox == "sb1" && e.Live.Runtime == "kind" && e.Live.Unproven, "sandbox %+v is asked", e.Live)
	b.Prove("a", "sb2", true) // it is asked about no more
	wantShown(t, b, "a", "")
	b.Prove("a", "sb1", true)
	wantShown(t, b, "a", "sb1")
	wantChanged(t, changed(), "a")
	b.Propose("a", "sb1", "kind") // nothing new
	wantShown(t, b, "a", "sb1")
	b.Prove("a", "sb1", false)
	wantShown(t, b, "a", "")
	wantChanged(t, changed(), "a")
	b.Bind("a", "sb1", "kind")
	wantShown(t, b, "a", "sb1")
	b.Unbind("a", "sb2") // which it was before
	wantShown(t, b, "a", "sb1")
	b.Unbind("a", "sb1")
	wantShown(t, b, "a", "")
	wantChanged(t, changed(), "a", "a")
}

func TestUntrackedVolumesAreNotBound(t *testing.T) {
	b, changed := table()
	b.Bind("x", "sb1", "kind")
	wantShown(t, b, "x", "")
	b.Forget("x")
	b.Forget("b") // was not bound
	wantChanged(t, changed())
	b.Forget("c") // of another program: it was listed
	wantChanged(t, changed(), "c")
}

func TestSandboxesOfAPod(t *testing.T) {
	b, changed := table()
	for _, key := range []volume.Key{"a", "b", "c"} {
		b.Bind(key, "sb1", "kind")
	}
	wantChanged(t, changed(), "a", "b", "c")
	b.Bind("b", "sb2", "kind")
	changed()
	ours := b.DropOthers("1", "sb2")
	slices.Sort(ours)
	wantChanged(t, ours, "a", "b")
	wantChanged(t, changed(), "a")
	wantShown(t, b, "b", "sb2")
	wantChanged(t, b.DropSandbox("sb1"), "c")
	wantChanged(t, changed(), "c")
	wantShown(t, b, "b", "sb2")
}

// vanishing is the format of a tree in which another program removes each volume as soon as it was read.
type vanishing struct {
	Format
	tree *Tree
}

func (vanishing) KeyOf(dir string) (volume.Key, bool) { return volume.Key(dir), true }

func (f vanishing) Read(dir string) *volume.Volume {
	_ = os.Remove(f.tree.Path(dir))
	return &volume.Volume{Key: volume.Key(dir), Device: volume.Device{Path: "/dev/vdq"}}
}

// TestRemovedWhileItIsAdopted: the end of the directory is not handled again, and its device would stay taken.
func TestRemovedWhileItIsAdopted(t *testing.T) {
	dir := t.TempDir()
	tree := check.Value(OpenTree(TreeConfig{Root: dir + "/tree", Temp: dir + "/temp", Log: zap.NewNop()}))(t)
	s := New(tree, vanishing{tree: tree}, Hooks{})
	check.Must(t, os.Mkdir(tree.Path("a"), 0o700))
	s.AdoptForeign()
	check.That(t, len(s.Adopted()) == 0, "adopted: %v", s.Adopted())
}
