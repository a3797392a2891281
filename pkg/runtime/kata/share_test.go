package kata

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// TestDaemonsOfTwoKubeletsShareATree: neither takes the other's volumes for orphans,
// and each sees that the other's devices have an owner.
func TestDaemonsOfTwoKubeletsShareATree(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	root, _, _ := strings.Cut(v.Target, "/pods/")
	none := func(volume.Key) bool { return false }
	handler := func(kubelet, temp string) *Handler {
		cfg := b.cfg
		cfg.KubeletRoot, cfg.TempDir = kubelet, filepath.Join(filepath.Dir(b.cfg.TempDir), temp)
		h, err := New(cfg, nil, zap.NewNop())
		check.Must(t, err)
		return h
	}
	own, other := handler(root, "own"), handler("/elsewhere/kubelet", "other")
	for _, signed := range []bool{false, true} { // as an older version made it, and anew
		if signed {
			check.Must(t, own.Retract(t.Context(), v))
			if _, err := own.Publish(t.Context(), v); err != nil {
				t.Fatal(err)
			}
		}
		if orphans, err := own.Orphans(none); err != nil || len(orphans) != 1 {
			t.Errorf("signed %v: our orphans are %v, %v", signed, orphans, err)
		}
		if orphans, err := other.Orphans(none); err != nil || len(orphans) != 0 {
			t.Errorf("signed %v: the other's orphans are %v, %v", signed, orphans, err)
		}
		check.Must(t, other.Retract(t.Context(), v))
		if _, err := other.Publish(t.Context(), v); volume.KindOf(err) != volume.Conflict {
			t.Errorf("signed %v: published over it: %v", signed, err)
		}
		other.AdoptForeign()
		if !slices.ContainsFunc(other.Adopted(), func(o *volume.Volume) bool { return o.Device.Path == v.Device.Path }) {
			t.Errorf("signed %v: the device's owner is not seen: %v", signed, other.Adopted())
		}
		if _, err := os.Stat(b.dir(v)); err != nil {
			t.Errorf("signed %v: %v", signed, err)
		}
	}
	var value [256]byte
	n, err := unix.Lgetxattr(b.dir(v), "trusted.crust-proxy.root", value[:])
	if os.Geteuid() == 0 && (err != nil || string(value[:n]) != root) {
		t.Errorf("the directory is signed %q, %v", value[:n], err)
	}
}
