package peercred

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// tempOf is a socket's name until it is renamed into place.
func tempOf(t *testing.T, path string) string {
	t.Helper()
	dir := check.Value(openParent(path))(t)
	sys.CloseFD(dir.fd)
	return filepath.Join(filepath.Dir(path), dir.temp)
}

func mustListen(t *testing.T, path string, mode fs.FileMode, group string) *Listener {
	t.Helper()
	l := check.Value(Listen(path, mode, group))(t)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func onlyEntries(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries := check.Value(os.ReadDir(dir))(t)
	names := sys.Map(entries, os.DirEntry.Name)
	check.That(t, strings.Join(names, " ") == strings.Join(want, " "), "the directory holds %q, want %q", names, want)
}

func TestListen(t *testing.T) {
	for _, mode := range []fs.FileMode{0o600, 0o660} {
		dir := t.TempDir()
		path := filepath.Join(dir, "a.sock")
		old := unix.Umask(0) // the mode must not depend on it
		l := mustListen(t, path, mode, strconv.Itoa(os.Getgid()))
		unix.Umask(old)
		info, err := os.Lstat(path)
		check.That(t, err == nil && info.Mode() == fs.ModeSocket|mode, "got %v, %v", info.Mode(), err)
		check.That(t, l.Addr().String() == path, "the address is %v", l.Addr())
		_ = check.Value(net.Dial("unix", path))(t).Close()
		onlyEntries(t, dir, "a.sock")
		check.Must(t, errors.Join(l.Close(), l.Close()))
		onlyEntries(t, dir)
	}
}

func TestListenReplacesStaleSocketOnly(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.sock")
	check.StaleSocket(t, path)
	// A process that was killed while it listened left this.
	check.StaleSocket(t, tempOf(t, path))
	first := mustListen(t, path, 0o600, "")
	_, err := Listen(path, 0o600, "")
	check.That(t, err != nil && strings.Contains(err.Error(), "another process serves"), "a live socket: %v", err)
	onlyEntries(t, dir, "a.sock")

	other := filepath.Join(dir, "b")
	check.Must(t, os.WriteFile(other, []byte("kept"), 0o600))
	_, err = Listen(other, 0o600, "")
	check.That(t, err != nil && strings.Contains(err.Error(), "not a socket"), "a file: %v", err)
	content := check.Value(os.ReadFile(other))(t) //nolint:gosec // of this test
	check.That(t, string(content) == "kept", "the file was touched: %q", content)

	link, target := filepath.Join(dir, "c"), filepath.Join(dir, "target")
	check.Must(t, os.Symlink(target, link))
	check.That(t, check.Err(Listen(link, 0o600, "")) != nil, "a symbolic link was taken")
	onlyEntries(t, dir, "a.sock", "b", "c")
	_ = first.Close()
}

// TestALockOfOthersStopsNobody: who can read a directory can lock it for ever.
func TestALockOfOthersStopsNobody(t *testing.T) {
	dir := t.TempDir()
	locked := check.Value(os.Open(dir))(t)
	defer func() { _ = locked.Close() }()
	check.Must(t, unix.Flock(int(locked.Fd()), unix.LOCK_EX))
	path, owned := filepath.Join(dir, "a.sock"), filepath.Join(dir, "b.sock")
	check.StaleSocket(t, path)
	mustListen(t, path, 0o600, "")
	check.Eventually(t, "no lock is waited for", func() bool {
		began := time.Now()
		l := check.Value(Replace(owned))(t)
		return l.Close() == nil && time.Since(began) < lockTime
	})
}

// TestReplace replaces whatever has the name, once it listens; what is there stays if it cannot.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.sock")
	check.Must(t, os.WriteFile(path, nil, 0o600))
	first := check.Value(Replace(path))(t)
	check.WithoutDescriptors(t, func() {
		check.That(t, check.Err(Replace(path)) != nil, "it listens without a descriptor")
	})
	block := tempOf(t, path)
	check.Must(t, os.Mkdir(block, 0o700))
	check.That(t, check.Err(Replace(path)) != nil, "it listens where the socket cannot be made")
	check.That(t, check.Value(sys.IsServed(path))(t), "the socket of before has gone")
	check.Must(t, os.Remove(block))
	second := check.Value(Replace(path))(t)
	check.Must(t, first.Close())
	onlyEntries(t, dir, "a.sock")
	check.Must(t, second.Close())
	onlyEntries(t, dir)
}

func TestCloseRemovesOnlyItsOwn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	first := mustListen(t, path, 0o600, "")
	check.Must(t, os.Remove(path))
	second := mustListen(t, path, 0o600, "")
	check.Must(t, first.Close())
	_ = check.Value(net.Dial("unix", path))(t).Close() // the other's socket is there
	_ = second.Close()
}

func TestListenRefuses(t *testing.T) {
	dir := t.TempDir()
	for name, try := range map[string]func() (*Listener, error){
		"a wide mode":       func() (*Listener, error) { return Listen(filepath.Join(dir, "a"), 0o666, "") },
		"a setuid mode":     func() (*Listener, error) { return Listen(filepath.Join(dir, "a"), fs.ModeSetuid|0o600, "") },
		"an abstract name":  func() (*Listener, error) { return Listen("@a", 0o600, "") },
		"a relative path":   func() (*Listener, error) { return Listen("a", 0o600, "") },
		"a long path":       func() (*Listener, error) { return Listen("/"+strings.Repeat("a", 107), 0o600, "") },
		"a missing parent":  func() (*Listener, error) { return Listen(filepath.Join(dir, "no", "a"), 0o600, "") },
		"an unknown group":  func() (*Listener, error) { return Listen(filepath.Join(dir, "a"), 0o660, "no-such-group-here") },
		"the socket of dir": func() (*Listener, error) { return Listen(dir, 0o600, "") },
	} {
		if l, err := try(); err == nil {
			t.Errorf("%s is taken", name)
			_ = l.Close()
		}
	}
	onlyEntries(t, dir)
}

func TestListenOnTheLongestPath(t *testing.T) {
	dir := check.ShortDir(t)
	path := filepath.Join(dir, strings.Repeat("x", sys.MaxSocketPath-len(dir)-1))
	mustListen(t, path, 0o600, "")
	_ = check.Value(net.Dial("unix", path))(t).Close()
}

func TestManyListenAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	check.StaleSocket(t, path)
	defer func(was time.Duration) { lockTime = was }(lockTime)
	lockTime = time.Minute
	var mu sync.Mutex
	var won []*Listener
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if l, err := Listen(path, 0o600, ""); err == nil {
				mu.Lock()
				won = append(won, l)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	check.That(t, len(won) == 1, "%d of them listen", len(won))
	for _, l := range won {
		_ = l.Close()
	}
}

// TestNoInstantOfAWiderMode looks at both names of the socket all the while.
func TestNoInstantOfAWiderMode(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.sock")
	old := unix.Umask(0)
	defer unix.Umask(old)
	stop, temp := make(chan struct{}), tempOf(t, path)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, name := range []string{path, temp} {
				if info, err := os.Lstat(name); err == nil && info.Mode().Perm() != 0o600 {
					t.Errorf("%s was seen with mode %v", name, info.Mode())
					return
				}
			}
		}
	})
	for range 200 {
		l, err := Listen(path, 0o600, "")
		if err != nil {
			t.Error(err)
			break
		}
		_ = l.Close()
	}
	close(stop)
	wg.Wait()
}
