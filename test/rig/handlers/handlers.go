// Package handlers has what the unit tests of the runtime handlers share.
package handlers

import (
	"context"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Run runs a handler until stop is called.
func Run(t testing.TB, h runtime.Handler) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := check.Begin(func() error { return h.Run(ctx) })
	return sync.OnceFunc(func() {
		cancel()
		err := <-done
		check.That(t, err == nil, "Run: %v", err)
	})
}

// Volume returns a volume of a pod that is named by its name.
func Volume(handler, name string, device volume.Device) *volume.Volume {
	target := "/var/lib/kubelet/pods/pod-" + name + "/volumes/kubernetes.io~csi/pvc/mount"
	return &volume.Volume{
		Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, FSType: "ext4", Handler: handler, PodUID: "pod-" + name,
		Device: device,
	}
}

// Sized gives a volume a file of this size as its device.
func Sized(t testing.TB, v *volume.Volume, path string, size int64) {
	t.Helper()
	check.Must(t, os.WriteFile(path, nil, 0o600))
	check.Must(t, os.Truncate(path, size))
	v.Device = claim.Identify(path)
}

// CountFiles counts what is in a directory.
func CountFiles(t testing.TB, dir string) int {
	t.Helper()
	entries := check.Value(os.ReadDir(dir))(t)
	return len(entries)
}

// WantError wants an error of a kind whose text names the volume and has these parts.
func WantError(t testing.TB, err error, kind volume.Kind, v *volume.Volume, parts ...string) {
	t.Helper()
	check.Require(t, err != nil && volume.KindOf(err) == kind, "%v of kind %v, want %v", err, volume.KindOf(err), kind)
	check.Says(t, "the error", err.Error(), append(parts, v.Target)...)
	check.That(t, sys.IsText(err.Error()) && len(err.Error()) <= 2048, "the error is not short plain text: %q", err)
}

// BoundTo reports whether a volume is bound to a sandbox, or to none if id is "".
func BoundTo(h runtime.Handler, v *volume.Volume, id string) bool {
	binding, bound := h.Binding(v)
	return bound && binding.Sandbox == id || !bound && id == ""
}

// Changes collects what OnChange was called with.
type Changes struct {
	mu   sync.Mutex
	keys []volume.Key
}

// Add is for Config.OnChange.
func (c *Changes) Add(key volume.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.keys = append(c.keys, key)
}

// Has reports whether a volume changed.
func (c *Changes) Has(key volume.Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Contains(c.keys, key)
}
