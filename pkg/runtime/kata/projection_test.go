package kata

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestModes(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	for path, want := range map[string]fs.FileMode{
		b.cfg.DirectVolumes: fs.ModeDir | 0o700, b.dir(v): fs.ModeDir | 0o700, filepath.Join(b.dir(v), infoName): 0o600,
	} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
}

func TestSamePublishWritesNothing(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	before := statOf(t, filepath.Join(b.dir(v), infoName))
	published(t, b, "a")
	if after := statOf(t, filepath.Join(b.dir(v), infoName)); after.Ino != before.Ino || after.Mtim != before.Mtim {
		t.Error("the file was written again")
	}
}

func statOf(t *testing.T, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	check.Must(t, unix.Lstat(path, &st))
	return st
}

// A sandbox that has the volume keeps its id file over a change.
func TestRepublishKeepsIDs(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	b.startShim(t, v, "sb1")
	changed := *v
	changed.MountFlags = []string{"noatime"}
	b.publish(t, &changed)
	if ids, err := b.h.bindings.candidates(v); err != nil || len(ids) != 1 || ids[0] != "sb1" {
		t.Errorf("ids %q", ids)
	}
	// A lost file is put back, too.
	check.Must(t, os.Remove(filepath.Join(b.dir(v), infoName)))
	published(t, b, "a")
	if _, exists := b.Projection(t, v); !exists {
		t.Error("the lost file was not put back")
	}
}

// Retract never goes into a directory that somebody filled.
func TestRetractIsNotRecursive(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := published(t, b, "a")
	precious := filepath.Join(b.dir(v), "sub", "precious")
	for _, dir := range []string{filepath.Dir(precious), filepath.Join(b.dir(v), "empty")} {
		check.Must(t, os.Mkdir(dir, 0o700))
	}
	check.Must(t, os.WriteFile(precious, []byte("data"), 0o600))
	check.Must(t, b.h.Retract(t.Context(), v))
	if _, err := os.Stat(b.dir(v)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still in Kata's tree: %v", err)
	}
	if n := b.CountLeftovers(t); n != 1 {
		t.Errorf("%d leftovers", n)
	}
	b.Restart(t)
	kept, err := filepath.Glob(filepath.Join(b.cfg.TempDir, "*", "sub", "precious"))
	if err != nil || len(kept) != 1 {
		t.Errorf("the file in the sub-directory is gone: %v, %v", kept, err)
	}
	published(t, b, "a")
}

// Another writer's empty directory is on its way to being a volume.
func TestForeignEmptyDirectory(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := b.Volume("a")
	check.Must(t, os.Mkdir(b.dir(v), 0o700))
	_, err := b.h.Publish(t.Context(), v)
	handlers.WantError(t, err, volume.Conflict, v, "another program")
	check.Must(t, b.h.Retract(t.Context(), v))
	if _, err := os.Stat(b.dir(v)); err != nil {
		t.Errorf("a foreign directory was removed: %v", err)
	}
}

func TestRootIsMadeAgain(t *testing.T) {
	b := newBench(t, kataemu.Go)
	published(t, b, "a")
	check.Must(t, os.RemoveAll(b.cfg.DirectVolumes))
	v := published(t, b, "a")
	if _, exists := b.Projection(t, v); !exists {
		t.Fatal("not published")
	}
}

func TestPlaces(t *testing.T) {
	dir := handlers.ShortDir(t)
	inside := testConfig(dir)
	inside.TempDir = filepath.Join(inside.DirectVolumes, "tmp")
	if _, err := New(inside, nil, zap.NewNop()); volume.KindOf(err) != volume.Invalid {
		t.Errorf("a TempDir in Kata's tree: %v", err)
	}
	if _, err := New(inside, nil, zap.NewNop()); err == nil || !strings.Contains(err.Error(), "put it elsewhere") {
		t.Errorf("%v", err)
	}
	elsewhere := testConfig(dir)
	elsewhere.TempDir = "/dev/shm/crust-proxy-test"
	t.Cleanup(func() { _ = os.Remove(elsewhere.TempDir) })
	if statOf(t, "/dev/shm").Dev == statOf(t, dir).Dev {
		if os.Getenv("CI") == "true" {
			t.Fatal("/dev/shm is no filesystem of its own here")
		}
		t.Skip("/dev/shm is no filesystem of its own here")
	}
	if _, err := New(elsewhere, nil, zap.NewNop()); volume.KindOf(err) != volume.Invalid {
		t.Errorf("a TempDir on another filesystem: %v", err)
	}
}

// Readers as Kata's are: open, read, parse. They must never see half a file.
func TestReadsAreNeverTorn(t *testing.T) {
	b := newBench(t, kataemu.Go)
	one := published(t, b, "a")
	two := *one
	two.MountFlags = []string{strings.Repeat("x", 3000)}
	file := filepath.Join(b.dir(one), infoName)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var readers sync.WaitGroup
	for range 16 {
		readers.Go(func() { readUntil(ctx, t, file) })
	}
	for i := 0; ctx.Err() == nil; i++ {
		b.publish(t, []*volume.Volume{one, &two}[i%2])
	}
	readers.Wait()
}

func readUntil(ctx context.Context, t *testing.T, file string) {
	for ctx.Err() == nil {
		raw, err := sys.ReadSmall(file, abi.MaxInfo)
		if err == nil {
			_, err = abi.Parse(raw)
		}
		if err != nil {
			t.Errorf("%q: %v", sys.ClipTo(string(raw), 100), err)
			return
		}
	}
}
