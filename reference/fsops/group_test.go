package fsops_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
)

func open(t testing.TB, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func mode(t testing.TB, path string) os.FileMode {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

// Who is not root may give files to the group that they have, which leaves the modes.
func TestApplyGroupChangesModes(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	deep := filepath.Join(dir, strings.Repeat("d/", 200))
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{outside, filepath.Join(deep, "file"), filepath.Join(dir, "a\nb")} {
		if err := os.WriteFile(path, nil, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	gid := uint32(os.Getgid()) //nolint:gosec // no group is negative
	changed, err := fsops.ApplyGroup(t.Context(), open(t, dir), gid, volume.GroupOnMismatch)
	if err != nil || changed < 203 {
		t.Fatalf("%d changed: %v", changed, err)
	}
	for path, want := range map[string]os.FileMode{
		dir: os.ModeDir | os.ModeSetgid | 0o770, deep: os.ModeDir | os.ModeSetgid | 0o770,
		filepath.Join(deep, "file"): 0o660, filepath.Join(dir, "a\nb"): 0o660, outside: 0o400,
	} {
		if got := mode(t, path) &^ 0o007; got != want {
			t.Errorf("%q is %v instead of %v", path, got, want)
		}
	}
	if changed, err := fsops.ApplyGroup(t.Context(), open(t, dir), gid, volume.GroupAlways); err != nil || changed != 0 {
		t.Errorf("again: %d changed: %v", changed, err)
	}
}

func TestApplyGroupRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := fsops.ApplyGroup(t.Context(), open(t, file), 1, volume.GroupAlways); err == nil {
		t.Error("a file is taken for a root directory")
	}
}
