package rig

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// insideEnv is set in the tests' own namespaces, to their mark.
const insideEnv = "CRUST_TEST_NAMESPACE"

// mark is in the names of all directories of this run, and in those of no other.
func mark() string { return os.Getenv(insideEnv) }

// newMark alternates letters and digits: no word does, and what os.MkdirTemp adds to names are digits.
func newMark() string {
	mark := make([]byte, 6)
	_, _ = rand.Read(mark) // it never fails
	for i, b := range mark {
		mark[i] = 'a' + b%26
		if i%2 == 1 {
			mark[i] = '0' + b%10
		}
	}
	return string(mark)
}

// Prefix is for os.MkdirTemp, where a path has to be shorter than that of t.TempDir: a loop device over a file that is
// left below is known to be of these tests.
func Prefix(name string) string { return name + mark() }

// ownTemp has temporary files lie in a directory with our mark, and a stamp in it that says so.
func ownTemp() (remove func(), err error) {
	dir := filepath.Join(os.TempDir(), Prefix("crust-"))
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // others than root read programs in it
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, stampFile), []byte(stampText+mark()), 0o600); err != nil {
		return nil, err
	}
	return func() { _ = os.RemoveAll(dir) }, os.Setenv("TMPDIR", dir)
}

const (
	stampFile = ".crust-test-run"
	stampText = "This directory is of one run of crust-proxy's tests. The next run may remove all with its mark: "
)

// stamped returns the mark of a run's directory, or "". It may be another's that only has such a name:
// nobody but root can have written a stamp into a directory that is root's alone.
func stamped(dir string) (mark string) {
	file := filepath.Join(dir, stampFile)
	if !rootOnly(dir, os.ModeDir) || !rootOnly(file, 0) {
		return ""
	}
	mark = strings.TrimPrefix(filepath.Base(dir), "crust-")
	if stamp, err := os.ReadFile(file); err != nil || string(stamp) != stampText+mark { //nolint:gosec // it is root's
		return ""
	}
	return mark
}

// rootOwns reports whether a path, which may be a link, belongs to root.
func rootOwns(path string) bool {
	info, err := os.Lstat(path)
	if err != nil {
		return false
	}
	stat, is := info.Sys().(*syscall.Stat_t)
	return is && stat.Uid == 0
}

// rootOnly reports whether a path is of a kind, so that no link leads elsewhere, and only root can write to it.
func rootOnly(path string, kind os.FileMode) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().Type() == kind && info.Mode().Perm()&0o022 == 0 && rootOwns(path)
}

// hasMark reports whether one of the names in a path is one that Prefix gives to a run with a mark.
func hasMark(path, mark string) bool {
	return slices.ContainsFunc(strings.Split(path, "/"), func(name string) bool {
		before, after, found := strings.Cut(name, mark)
		return found && strings.Trim(before, lowerCase) == "" && strings.Trim(after, "0123456789") == ""
	})
}

const lowerCase = "abcdefghijklmnopqrstuvwxyz-"
