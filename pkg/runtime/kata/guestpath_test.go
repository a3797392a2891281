package kata

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/kataemu"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

func TestGuestPath(t *testing.T) {
	const container = "c0ffee00112233445566"
	const fine = deferral.Kind(255)
	for name, c := range map[string]struct {
		dirs, files  []string
		destinations []string
		noTracker    bool
		trackerError error
		want         string
		kind         deferral.Kind
	}{
		"one":               {dirs: []string{"rw/dev1-0a1b-data"}, destinations: []string{"/data"}, want: "dev1-0a1b-data", kind: fine},
		"with dashes":       {dirs: []string{"rw/dev1-0a1b-my-data"}, destinations: []string{"/x/my-data/"}, want: "dev1-0a1b-my-data", kind: fine},
		"read-only":         {dirs: []string{"ro/dev1-0a1b-data"}, destinations: []string{"/data"}, want: "dev1-0a1b-data", kind: fine},
		"in both":           {dirs: []string{"ro/dev1-0a1b-data", "rw/dev1-0a1b-data"}, destinations: []string{"/data"}, want: "dev1-0a1b-data", kind: fine},
		"none yet":          {destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"another's":         {dirs: []string{"rw/dev1-0a1b-other"}, destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"longer name":       {dirs: []string{"rw/dev1-0a1b-x-data"}, destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"a container's":     {dirs: []string{"rw/" + container + "-0a1b-data"}, destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"a container's cut": {dirs: []string{"rw/" + container[:10] + "-0a1b-data"}, destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"a file":            {files: []string{"rw/dev1-0a1b-data"}, destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"no hex":            {dirs: []string{"rw/dev1-wxyz-data"}, destinations: []string{"/data"}, kind: deferral.NoSandbox},
		"control character": {dirs: []string{"rw/dev1-0a1b-da\nta"}, destinations: []string{"/da\nta"}, kind: deferral.NoSandbox},
		"two containers":    {dirs: []string{"rw/dev1-0a1b-data", "rw/dev1-0a1c-srv"}, destinations: []string{"/data", "/srv"}, want: "dev1-0a1b-data", kind: fine},
		"two volumes":       {dirs: []string{"rw/dev1-0a1b-data", "rw/dev2-0a1c-data"}, destinations: []string{"/data"}, kind: deferral.Unsupported},
		"no tracker, one":   {dirs: []string{"rw/dev1-0a1b-data"}, noTracker: true, want: "dev1-0a1b-data", kind: fine},
		"no tracker, two":   {dirs: []string{"rw/dev1-0a1b-a", "rw/dev2-0a1b-b"}, noTracker: true, kind: deferral.Unsupported},
		"tracker fails":     {dirs: []string{"rw/dev1-0a1b-data"}, trackerError: errors.New("no containerd"), kind: deferral.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, kataemu.Rust)
			b.destinations, b.containers, b.err = c.destinations, []string{container}, c.trackerError
			if c.noTracker {
				b.h.sandboxes = nil
			}
			makeShared(t, filepath.Join(b.cfg.SharedSandboxes, "sb1"), c.dirs, c.files)
			v := b.Volume("a")
			got, err := b.h.guestPath(t.Context(), v, "sb1")
			if c.kind != fine {
				wantError(t, err, c.kind, v, "sb1")
				return
			}
			if want := b.cfg.GuestShared + c.want; err != nil || got != want {
				t.Errorf("%q, %v, want %q", got, err, want)
			}
		})
	}
}

func makeShared(t *testing.T, root string, dirs, files []string) {
	t.Helper()
	for _, name := range append(slices.Clone(dirs), files...) {
		path := filepath.Join(root, name[:2], "passthrough", name[3:])
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		var err error
		if slices.Contains(files, name) {
			err = os.WriteFile(path, nil, 0o600)
		} else {
			err = os.Mkdir(path, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A container that is restarted in its sandbox has the volume at a new path.
func TestGuestPathIsFoundAgain(t *testing.T) {
	b := newBench(t, kataemu.Rust)
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	if _, err := b.h.Stats(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	passthrough := filepath.Join(b.cfg.SharedSandboxes, "sb1", "rw", "passthrough")
	if err := os.RemoveAll(passthrough); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(passthrough, "dev1-ffff-data"), 0o700); err != nil {
		t.Fatal(err)
	}
	shim.Unmount()
	shim.Mount(b.cfg.GuestShared+"dev1-ffff-data", kataemu.MountedAt("/"))
	if _, err := b.h.Stats(t.Context(), v); err != nil {
		t.Errorf("after the container's restart: %v", err)
	}
}

// Without a tracker nobody knows of a runtime-rs sandbox, and the error says so.
func TestRustNeedsTracker(t *testing.T) {
	h, err := New(testConfig(shortDir(t)), nil, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	v := plainVolume()
	if err := h.Publish(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	_, err = h.Stats(t.Context(), v)
	wantError(t, err, deferral.NoSandbox, v, "container runtime is not followed")
}
