//go:build system

package kata

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

func newHandler(t *testing.T, root string) (*kata.Handler, kata.Config) {
	t.Helper()
	cfg := kata.Config{
		DirectVolumes: filepath.Join(root, "dv"), TempDir: filepath.Join(root, "tmp"), StateDir: filepath.Join(root, "state"),
		GoSandboxes: filepath.Join(root, "vc"), RustSandboxes: filepath.Join(root, "rs"), Filesystems: []string{"ext4"},
	}
	h := check.Value(kata.New(cfg, nil, zap.NewNop()))(t)
	check.Running(t, h.Run)
	return h, cfg
}

func testVolume(name string) *volume.Volume {
	target := "/var/lib/kubelet/pods/" + name + "/volumes/kubernetes.io~csi/pvc/mount"
	return &volume.Volume{
		Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Handler: kata.Name,
		FSType: "ext4", Device: volume.Device{Kind: volume.BlockDevice, Path: "/dev/vdb"}, PodUID: name,
	}
}

// A full tmpfs is a clear error. The old file stays whole, nothing is left, and what was published can be taken back.
func TestFullTmpfs(t *testing.T) {
	root := rig.Tmpfs(t, "size=256k")
	h, cfg := newHandler(t, root)
	old := testVolume("old")
	check.Must(t, check.Err(h.Publish(t.Context(), old)))
	before := projections(t, cfg)
	check.Is(t, os.WriteFile(filepath.Join(root, "fill"), make([]byte, 1<<20), 0o600), unix.ENOSPC) // or the tmpfs is not full
	changed := *old
	changed.MountFlags = []string{strings.Repeat("x", 1000)}
	for _, v := range []*volume.Volume{&changed, testVolume("new")} {
		check.Kind(t, check.Err(h.Publish(t.Context(), v)), volume.Exhausted, v.Target)
	}
	after := projections(t, cfg)
	check.That(t, slices.Equal(before, after), "before %q\nafter %q", before, after)
	left, err := os.ReadDir(cfg.TempDir)
	check.That(t, err == nil && len(left) == 0, "leftovers %v, %v", left, err)
	check.Must(t, h.Retract(t.Context(), old))
	after = projections(t, cfg)
	check.That(t, len(after) == 0, "after Retract: %q", after)
}

// projections lists every file in Kata's tree with its content.
func projections(t *testing.T, cfg kata.Config) []string {
	t.Helper()
	files := check.Value(filepath.Glob(filepath.Join(cfg.DirectVolumes, "*", "*")))(t)
	for i, file := range files {
		files[i] += ": " + string(check.Value(os.ReadFile(file))(t))
	}
	return files
}

// Kata takes every other file in a volume's directory for a sandbox id, so none
// may ever stand there. Each directory is watched from before it is in place.
func TestNoForeignFileEver(t *testing.T) {
	root := rig.Tmpfs(t, "")
	h, cfg := newHandler(t, root)
	watcher := check.Value(fsnotify.NewBufferedWatcher(1 << 16))(t)
	var reader sync.WaitGroup
	defer reader.Wait()
	defer func() { _ = watcher.Close() }()
	reader.Go(func() { wantOnlyInfo(t, watcher, cfg.DirectVolumes) })
	check.Must(t, watcher.Add(cfg.DirectVolumes))
	v := testVolume("kept")
	check.Must(t, check.Err(h.Publish(t.Context(), v)))
	kept, err := filepath.Glob(cfg.DirectVolumes + "/*")
	check.Require(t, err == nil && len(kept) == 1, "%v %v", kept, err)
	check.Must(t, watcher.Add(kept[0]))
	for i, began := 0, time.Now(); i < 100 || time.Since(began) < rig.RaceTime(); i++ {
		changed := *v
		changed.ReadOnly = i%2 == 0
		cycle(t, h, &changed, testVolume(fmt.Sprintf("v%d", i%7)))
	}
	time.Sleep(50 * time.Millisecond) // for the last events
}

// cycle changes one volume, and publishes and takes back another.
func cycle(t *testing.T, h *kata.Handler, changed, v *volume.Volume) {
	t.Helper()
	for _, step := range []func() error{
		func() error { _, err := h.Publish(t.Context(), changed); return err },
		func() error { _, err := h.Publish(t.Context(), v); return err },
		func() error { return h.Retract(t.Context(), v) },
	} {
		check.Must(t, step())
	}
}

// wantOnlyInfo accepts whole directories in the root and mountInfo.json in them, renamed into place.
func wantOnlyInfo(t *testing.T, watcher *fsnotify.Watcher, root string) {
	for {
		select {
		case event, ok := <-watcher.Events:
			if !ok {
				return
			}
			inRoot := filepath.Dir(event.Name) == root
			check.That(t, inRoot || event.Name == root || filepath.Base(event.Name) == "mountInfo.json", "a foreign file: %v", event)
			if event.Op.Has(fsnotify.Create) && inRoot {
				wantWhole(t, event.Name)
			}
		case err, ok := <-watcher.Errors:
			check.That(t, !ok, "the watch lost events: %v", err)
			return
		}
	}
}

// wantWhole checks a directory the moment it shows, if it is still there.
func wantWhole(t *testing.T, dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, entry := range entries {
		check.That(t, entry.Name() == "mountInfo.json", "a foreign file %s in %s", entry.Name(), dir)
	}
}
