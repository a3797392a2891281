package kata

import (
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// Where kubelet's root is a link, a runtime is given the path with the link in it:
// Kata looks for a directory that is named by that.
func TestTargetThroughALink(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := b.Volume("a")
	v.Target = filepath.Join(filepath.Dir(v.ResolvedTarget), "..", "link", "a")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := b.h.Publish(t.Context(), v)
	must(err)
	if _, shown := b.Projection(t, v); !shown || filepath.Base(b.dir(v)) != dirName(filepath.Clean(v.Target)) {
		t.Fatalf("published as %s", b.dir(v))
	}
	b.startShim(t, v, "sb1")
	b.Restart(t)
	known := func(key volume.Key) bool { return key == v.Key }
	if orphans, err := b.h.Orphans(known); err != nil || len(orphans) > 0 {
		t.Fatalf("a known volume is an orphan: %v, %v", orphans, err)
	}
	check.Eventually(t, "its sandbox is found after a restart", boundTo(b, v, "sb1"))
	b.stats(t, v)
	orphans, err := b.h.Orphans(func(volume.Key) bool { return false })
	if err != nil || len(orphans) != 1 || orphans[0].Key != v.Key {
		t.Fatalf("%v, %v", orphans, err)
	}
	must(b.h.Retract(t.Context(), orphans[0]))
	if _, shown := b.Projection(t, v); shown {
		t.Fatal("the orphan is still there")
	}
	must(b.h.Retract(t.Context(), v))
}
