package abi_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func openDir(t *testing.T) (*abi.Dir, string) {
	t.Helper()
	root, name := t.TempDir(), abi.DirName(target)
	path := filepath.Join(root, name)
	check.Must(t, os.Mkdir(path, 0o700))
	dir := check.Value(abi.Open(root, name))(t)
	t.Cleanup(func() { _ = dir.Close() })
	return dir, path
}

func put(t *testing.T, dir *abi.Dir, name, content string) {
	t.Helper()
	check.Must(t, dir.Put(name, []byte(content)))
}

func TestOpen(t *testing.T) {
	root, name := t.TempDir(), abi.DirName(target)
	check.Is(t, check.Err(abi.Open(root, name)), fs.ErrNotExist) // no directory
	check.Fails(t, check.Err(abi.Open(root, "../"+name[3:])))    // or another name opened
	check.Must(t, os.Symlink("/tmp", filepath.Join(root, name)))
	check.Fails(t, check.Err(abi.Open(root, name))) // or a link was followed
}

func TestFiles(t *testing.T) {
	dir, path := openDir(t)
	put(t, dir, abi.CLIName, "/usr/bin/one\n")
	put(t, dir, abi.CLIName, "/usr/bin/two\n")
	line, err := dir.Line(abi.CLIName)
	check.Require(t, err == nil && line == "/usr/bin/two", "%q, %v", line, err)
	for _, bad := range []string{"", "relative\n", "/a\n/b\n", "/a\x00b"} {
		put(t, dir, abi.SocketName, bad)
		check.Fails(t, check.Err(dir.Line(abi.SocketName)))
	}
	check.Must(t, os.Symlink("/etc/hostname", filepath.Join(path, "link")))
	check.Fails(t, check.Err(dir.Read("link", 100)))
	check.Fails(t, check.Err(dir.Read(abi.CLIName, 3))) // or a limit was passed over
	for range 2 {
		check.Must(t, dir.Remove(abi.CLIName))
	}
	left, err := filepath.Glob(path + "/.*")
	check.Require(t, err == nil && len(left) == 0, "left behind: %v, %v", left, err)
}

func TestInfoOfAnother(t *testing.T) {
	dir, _ := openDir(t)
	raw := check.Value(abi.Encode(testVolume()))(t)
	put(t, dir, abi.InfoName, string(raw))
	check.Value(dir.Info())(t)
	other := *testVolume()
	other.ResolvedTarget += "x"
	raw = check.Value(abi.Encode(&other))(t)
	put(t, dir, abi.InfoName, string(raw))
	check.Fails(t, check.Err(dir.Info()))
}

func TestSandboxes(t *testing.T) {
	dir, path := openDir(t)
	for i, name := range []string{"first", "third", "second"} {
		put(t, dir, name, "{}")
		at := time.Unix(1_000_000_000+[]int64{0, 2, 1}[i], 0)
		check.Must(t, os.Chtimes(filepath.Join(path, name), at, at))
	}
	put(t, dir, abi.InfoName, "{}")
	put(t, dir, abi.CLIName, "/x\n")
	put(t, dir, "not an id", "")
	check.Must(t, os.Mkdir(filepath.Join(path, "directory"), 0o700))
	got := check.Value(dir.Sandboxes())(t)
	check.Same(t, cmp.Diff([]string{"third", "second", "first"}, got), "-want +got")
}

func TestLock(t *testing.T) {
	dir, path := openDir(t)
	other := check.Value(abi.Open(filepath.Dir(path), dir.Name()))(t)
	check.Must(t, dir.Lock(time.Second))
	check.Require(t, other.Lock(20*time.Millisecond) != nil, "locked twice")
	check.Must(t, dir.Unlock())
	check.Must(t, other.Lock(time.Second))
	check.Must(t, other.Close())
	for range 2 { // one of them gets the descriptor's number
		file := check.Value(os.Open(path))(t)
		defer func() { check.Must(t, file.Close()) }()
	}
	check.Fails(t, other.Close())
	check.Must(t, dir.Lock(time.Second)) // or closing kept the lock
}
