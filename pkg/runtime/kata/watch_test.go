package kata

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func boundTo(b *bench, v *volume.Volume, id string) func() bool {
	return func() bool { return handlers.BoundTo(b.h, v, id) }
}

func watched(b *bench, v *volume.Volume) func() bool {
	return func() bool { return b.h.store.Watch.Has(v.Key) }
}

// living starts a shim that no pod is known of.
func living(t *testing.T, b *bench, id string) *kataemu.Shim {
	t.Helper()
	shim := check.Value(kataemu.Start(kataemu.Options{Flavor: kataemu.Go, SandboxID: id, Sandboxes: b.cfg.GoSandboxes}))(t)
	t.Cleanup(func() { _ = shim.Stop() })
	return shim
}

// watching waits until Run watches.
func watching(t *testing.T, b *bench) {
	t.Helper()
	probe := published(t, b, "probe")
	check.Eventually(t, "the watch runs", func() bool { return b.h.store.Watch.Has(probe.Key) })
	check.Must(t, b.h.Retract(t.Context(), probe))
}

func newWatchedBench(t *testing.T) (*bench, *handlers.Changes) {
	t.Helper()
	var seen handlers.Changes
	b := newBench(t, kataemu.Go)
	b.stop()
	b.cfg.OnChange = seen.Add
	b.start(t)
	watching(t, b)
	return b, &seen
}

func TestBindingShowsAtOnce(t *testing.T) {
	b, seen := newWatchedBench(t)
	v := published(t, b, "a")
	check.Require(t, watched(b, v)(), "a published volume is not watched")
	living(t, b, "sb1")
	check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
	check.Eventually(t, "bound", boundTo(b, v, "sb1"))
	check.Eventually(t, "told", func() bool { return seen.Has(v.Key) })
	b.h.SandboxGone("sb1")
	check.That(t, boundTo(b, v, "")(), "bound to a sandbox that is gone")
	check.Must(t, b.h.Retract(t.Context(), v))
	check.Eventually(t, "nothing is left in memory", func() bool {
		tracked := b.h.store.Bindings.Volumes(func(projection.Entry) bool { return true })
		return len(tracked) == 0 && !b.h.store.Watch.Has(v.Key)
	})
}

// An id file of a sandbox that has ended is found as well, and does not bind the volume.
func TestWatchFindsWhatWasThere(t *testing.T) {
	b, _ := newWatchedBench(t)
	shim := living(t, b, "sb1")
	v := published(t, b, "a")
	foreign := b.Volume("foreign")
	b.PublishForeign(t, foreign)
	b.stop()
	check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
	b.start(t)
	check.Eventually(t, "bound", boundTo(b, v, "sb1"))
	check.Eventually(t, "adopted", func() bool { return len(b.h.Adopted()) == 1 })
	b.stop()
	check.Must(t, shim.Kill())
	b.start(t)
	check.Eventually(t, "adopted again", func() bool { return len(b.h.Adopted()) == 1 })
	check.Eventually(t, "the id is read", func() bool { return b.h.bindings.current(v).id == "sb1" })
	check.That(t, boundTo(b, v, "")(), "bound to a sandbox whose shim is dead")
}

func TestRootIsWatchedAgain(t *testing.T) {
	b, _ := newWatchedBench(t)
	published(t, b, "a")
	check.Must(t, os.RemoveAll(b.cfg.DirectVolumes))
	check.Succeeds(t, "made again", func() error { _, err := os.Stat(b.cfg.DirectVolumes); return err })
	foreign := b.Volume("foreign")
	b.PublishForeign(t, foreign)
	check.Eventually(t, "adopted", func() bool { return len(b.h.Adopted()) == 1 })
	check.Must(t, b.h.Health(t.Context()))
}

// A flood of foreign directories and sandbox ids loses nothing.
func TestManyEvents(t *testing.T) {
	b, _ := newWatchedBench(t)
	const n = 300
	living(t, b, "sb1")
	for i := range n {
		b.PublishForeign(t, b.Volume(fmt.Sprintf("f%d", i)))
	}
	check.Eventually(t, "all adopted", func() bool { return len(b.h.Adopted()) == n })
	for i := range n {
		v := b.Volume(fmt.Sprintf("f%d", i))
		check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
	}
	check.Eventually(t, "all bound", func() bool { return boundTo(b, b.Volume(fmt.Sprintf("f%d", n-1)), "sb1")() })
}

func TestOverflowReadsTheTree(t *testing.T) {
	b, _ := newWatchedBench(t)
	foreign := b.Volume("foreign")
	b.PublishForeign(t, foreign)
	check.Eventually(t, "adopted", func() bool { return len(b.h.Adopted()) == 1 })
	v := published(t, b, "a")
	living(t, b, "sb1")
	check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
	check.Eventually(t, "bound", boundTo(b, v, "sb1"))
	b.h.store.Bindings.Unbind(v.Key, "sb1") // as if its event had been lost
	b.h.store.Bindings.Forget(foreign.Key)
	b.h.store.Watch.Event(-1, unix.IN_Q_OVERFLOW, "")
	check.Eventually(t, "adopted again", func() bool { return len(b.h.Adopted()) == 1 })
	check.Eventually(t, "bound again", boundTo(b, v, "sb1"))
	check.Eventually(t, "both are watched", func() bool { return watched(b, v)() && watched(b, foreign)() })
}

func TestOddNamesInTheTree(t *testing.T) {
	b, _ := newWatchedBench(t)
	for _, name := range []string{"plain", ".dot", dirName("relative")} {
		check.Must(t, os.Mkdir(filepath.Join(b.cfg.DirectVolumes, name), 0o700))
	}
	v := b.Volume("bad")
	check.Must(t, os.Mkdir(b.dir(v), 0o700))
	check.Must(t, unix.Mkfifo(filepath.Join(b.dir(v), infoName), 0o600))
	good := b.Volume("good")
	b.PublishForeign(t, good)
	check.Eventually(t, "the good one is adopted", func() bool { return len(b.h.Adopted()) == 1 })
	orphans, err := b.h.Orphans(func(volume.Key) bool { return false })
	check.That(t, err == nil && len(orphans) == 0, "orphans %v, %v", orphans, err)
}

// The end of a directory that somebody removed is not that of its successor.
func TestSuccessorIsWatched(t *testing.T) {
	b, _ := newWatchedBench(t)
	living(t, b, "sb1")
	for range 20 {
		v := published(t, b, "a")
		check.Must(t, os.RemoveAll(b.dir(v)))
		published(t, b, "a")
		check.Require(t, watched(b, v)(), "the successor is not watched")
		check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
		check.Eventually(t, "bound", boundTo(b, v, "sb1"))
		check.Must(t, b.h.Retract(t.Context(), v))
	}
}

// TestRetractedWhileItIsFound: the watch finds the directory again after its volume was
// forgotten, and before it was removed.
func TestRetractedWhileItIsFound(t *testing.T) {
	b := newBench(t, kataemu.Go)
	b.stop()
	var again atomic.Pointer[func()]
	b.cfg.OnChange = func(volume.Key) {
		if find := again.Swap(nil); find != nil {
			(*find)()
		}
	}
	b.start(t)
	watching(t, b)
	v := published(t, b, "a")
	living(t, b, "sb1")
	check.Must(t, os.WriteFile(b.dir(v)+"/sb1", nil, 0o600))
	check.Eventually(t, "the volume is bound", boundTo(b, v, "sb1"))
	find := func() {
		check.Must(t, os.Rename(b.dir(v), b.dir(v)+".away"))
		check.Must(t, os.Rename(b.dir(v)+".away", b.dir(v)))
		check.Eventually(t, "the directory is found", watched(b, v))
	}
	again.Store(&find)
	check.Must(t, b.h.Retract(t.Context(), v))
	_, bound := b.h.Binding(v)
	check.That(t, !bound && !watched(b, v)(), "after Retract: bound %t, watched %t", bound, watched(b, v)())
}
