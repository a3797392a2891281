package rig

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

var building sync.Mutex

// Program builds one of our programs, static and with failpoints, and gives its path. It
// is built once for each test binary, in the directory that Run removes.
func Program(t T, name string) string {
	t.Helper()
	building.Lock()
	defer building.Unlock()
	path := filepath.Join(os.TempDir(), Prefix("crust-bin-"), name)
	if _, err := os.Stat(path); err != nil {
		check.Must(t, build(path, "cmd/"+name, append(os.Environ(), "CGO_ENABLED=0"), "-tags", "failpoints"))
	}
	return path
}

// BuildRelease builds programs of this project, by their names in cmd, into a directory, as a release has them.
func BuildRelease(dir string, names ...string) error {
	for _, name := range names {
		err := build(filepath.Join(dir, name), "cmd/"+name, append(os.Environ(), "CGO_ENABLED=0"), "-tags", "grpcnotrace", "-trimpath", "-ldflags", "-s -w")
		if err != nil {
			return err
		}
	}
	return nil
}

// BuildStatic builds a program that needs no library, by the path of its package in this project.
func BuildStatic(path, from string) error {
	return build(path, from, append(os.Environ(), "CGO_ENABLED=0"))
}

// build builds a program below bin/, where the Go tool links it again only if it has changed, for
// all runs of tests of this checkout, and copies it.
func build(path, from string, env []string, flags ...string) (err error) {
	root, err := checkout()
	if err != nil {
		return err
	}
	kept := filepath.Join(root, "bin/tests", strings.ReplaceAll(strings.Join(flags, ""), " ", ""), from)
	if err := errors.Join(os.MkdirAll(filepath.Dir(kept), 0o755), os.MkdirAll(filepath.Dir(path), 0o755)); err != nil { //nolint:gosec // programs
		return err
	}
	lock, err := os.Open(filepath.Dir(kept)) // tests of several packages may run
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	cmd := exec.Command("go", append(append([]string{"build", "-o", kept}, flags...), "github.com/crust-proxy/crust-proxy/"+from)...)
	cmd.Env = env
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", from, err, out)
	}
	program, err := os.ReadFile(kept) //nolint:gosec // just built
	if err != nil {
		return err
	}
	return os.WriteFile(path, program, 0o755) //nolint:gosec // a program
}

// Package is the file of one of our packages. All are built once for all tests of a package; hack/test.sh
// builds them once, and names their directory.
func Package(t T, name, format string) string {
	t.Helper()
	building.Lock()
	defer building.Unlock()
	dir := cmp.Or(os.Getenv("CRUST_PACKAGES"), filepath.Join(os.TempDir(), "packages"))
	if _, err := os.Stat(dir); err != nil {
		check.Must(t, check.Err(Script("package.sh", dir)))
	}
	paths, err := filepath.Glob(filepath.Join(dir, name+"?[0-9]*."+format))
	check.Require(t, err == nil && len(paths) == 1, "%s.%s in %s: %q %v, want one", name, format, dir, paths, err)
	return paths[0]
}

// checkout is the directory of this source.
func checkout() (string, error) {
	_, here, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(here) {
		return "", errors.New("where the source lies is unknown: build the tests without -trimpath")
	}
	return filepath.Join(filepath.Dir(here), "../.."), nil
}

// Script runs one of the scripts in hack that build programs once, and gives the directory that it prints.
func Script(name string, args ...string) (string, error) {
	root, err := checkout()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "hack", name)
	out, err := exec.Command(path, args...).Output() //nolint:gosec // ours
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return "", fmt.Errorf("%s: %w\n%s", path, err, exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

// Get gets a page from a server on a Unix socket, on a connection of its own.
func Get(ctx context.Context, socket, path string) (string, error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://server"+path, http.NoBody)
	if err != nil {
		return "", err
	}
	reply, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = reply.Body.Close() }()
	body, err := io.ReadAll(reply.Body)
	if err != nil {
		return "", err
	}
	if reply.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", reply.Status, body)
	}
	return string(body), nil
}
