package rig

import (
	"crypto/rand"
	"os"
	"path/filepath"
)

// insideEnv is set in the tests' own namespaces, to their mark.
const insideEnv = "CRUST_TEST_NAMESPACE"

// mark is in the names of all directories of this run, and in those of no other.
func mark() string { return os.Getenv(insideEnv) }

// newMark has letters only: what os.MkdirTemp adds to names are digits.
func newMark() string {
	letters := make([]byte, 6)
	_, _ = rand.Read(letters) // it never fails
	for i, b := range letters {
		letters[i] = 'a' + b%26
	}
	return string(letters)
}

// Prefix is for os.MkdirTemp, where a path has to be shorter than that of
// t.TempDir: a loop device over a file that is left below is known to be of these
// tests.
func Prefix(name string) string { return name + mark() }

// ownTemp has temporary files lie in a directory with our mark.
func ownTemp() (remove func(), err error) {
	dir := filepath.Join(os.TempDir(), Prefix("crust-"))
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // others than root read programs in it
		return nil, err
	}
	return func() { _ = os.RemoveAll(dir) }, os.Setenv("TMPDIR", dir)
}
