package fsmount

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// descendIn opens a sub-directory and tells which one it is.
func descendIn(t *testing.T, root, sub string) (string, error) {
	t.Helper()
	at := check.Value(unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t)
	defer func() { _ = unix.Close(at) }()
	fd, err := Descend(at, sub)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(fd) }()
	return check.Value(os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)))(t), nil
}

func TestDescend(t *testing.T) {
	root := t.TempDir()
	check.Must(t, os.Chmod(root, os.ModeSetgid|0o770))
	check.Must(t, os.Mkdir(root+"/there", 0o700))
	check.Must(t, os.Symlink("there", root+"/inner"))
	for sub, want := range map[string]string{
		"": "", "there": "/there", "a/b/c": "/a/b/c", "inner": "/there", "inner/new": "/there/new", "there/../x": "",
	} {
		got, err := descendIn(t, root, sub)
		if sub == "there/../x" {
			check.That(t, err != nil, "%s: led to %s", sub, got)
			continue
		}
		check.That(t, err == nil && got == root+want, "%q: %q, %v", sub, got, err)
	}
	for _, made := range []string{"/a", "/a/b/c", "/there/new"} {
		var st unix.Stat_t
		check.Must(t, unix.Stat(root+made, &st))
		check.That(t, st.Mode&0o7777 == 0o2770, "%s was made with mode %o", made, st.Mode&0o7777)
	}
	var st unix.Stat_t
	check.Must(t, unix.Stat(root+"/there", &st))
	check.That(t, st.Mode&0o777 == 0o700, "a directory that was there has mode %o now", st.Mode&0o7777)
}

func TestDescendStaysInside(t *testing.T) {
	outside, root := t.TempDir(), t.TempDir()
	check.Must(t, os.WriteFile(root+"/file", nil, 0o600))
	check.Must(t, os.Symlink(outside, root+"/absolute"))
	check.Must(t, os.Symlink("../"+filepath.Base(outside), root+"/relative"))
	check.Must(t, os.Symlink("nowhere", root+"/dangling"))
	check.Must(t, os.Symlink("/proc/self/root", root+"/magic"))
	check.Must(t, os.Symlink("loop", root+"/loop"))
	for _, sub := range []string{"absolute", "absolute/new", "relative/new", "dangling", "dangling/new", "magic/tmp", "loop", "file", "file/new", ".."} {
		got, err := descendIn(t, root, sub)
		check.That(t, err != nil, "%s led to %s", sub, got)
	}
	left, err := os.ReadDir(outside)
	check.Require(t, err == nil && len(left) == 0, "made outside: %v, %v", left, err)
}
