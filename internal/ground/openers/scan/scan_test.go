package scan

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// holderEnv has this test program open a file and wait.
const holderEnv = "CRUST_TEST_HOLD"

func TestMain(m *testing.M) {
	if how, path, ok := strings.Cut(os.Getenv(holderEnv), ":"); ok {
		os.Exit(hold(how, path))
	}
	os.Exit(m.Run())
}

var flagsOf = map[string]int{"rw": unix.O_RDWR, "ro": unix.O_RDONLY, "path": unix.O_PATH}

func hold(how, path string) int {
	if attack := attacks[how]; attack != nil {
		if err := attack(path); err != nil {
			_, _ = os.Stderr.WriteString(how + ": " + err.Error() + "\n")
			return 1
		}
	} else if _, err := unix.Open(path, flagsOf[how]|unix.O_CLOEXEC, 0); err != nil {
		return 1
	}
	_, _ = os.Stdout.WriteString("open\n")
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	return 0
}

// start has another process open a file until the test ends.
func start(t testing.TB, how, path string) *exec.Cmd {
	t.Helper()
	return startAs(t, nil, how, path)
}

func startAs(t testing.TB, attr *syscall.SysProcAttr, how, path string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.SysProcAttr, cmd.Stderr = append(os.Environ(), holderEnv+"="+how+":"+path), attr, os.Stderr
	check.Must(t, check.Err(cmd.StdinPipe()))
	out := check.Value(cmd.StdoutPipe())(t)
	check.Must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	_, err := out.Read(make([]byte, 8))
	check.Require(t, err == nil, "the holder did not open %s: %v", path, err)
	return cmd
}

func image(t *testing.T) (path string, f File) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "disk.img")
	check.Must(t, os.WriteFile(path, []byte("x"), 0o600))
	var st unix.Stat_t
	check.Must(t, unix.Stat(path, &st))
	return path, File{Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev), Inode: st.Ino}
}

// find asks for what the test's own children have open. Processes of other users cannot be looked at where
// the test does not run as root; that is told, and no answer hides behind it.
func find(t *testing.T, s *Scanner, files ...File) []Holder {
	t.Helper()
	found, err := s.Find(t.Context(), nil, files...)
	check.Require(t, err == nil || errors.Is(err, unix.EACCES), "%v", err)
	return found
}

func TestWhoHasAnImageOpen(t *testing.T) {
	path, f := image(t)
	s := New()
	own := check.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
	defer func() { _ = own.Close() }()
	for _, how := range []string{"ro", "path"} {
		start(t, how, path)
	}
	check.Empty(t, find(t, s, f), "this process, a reader, or a mere name counts")
	link := path + ".link"
	check.Must(t, os.Link(path, link))
	writer := start(t, "rw", link)
	found := find(t, s, f)
	check.That(t, len(found) == 1 && found[0].PID == writer.Process.Pid && found[0].Program == filepath.Base(os.Args[0]),
		"found %v, want process %d (%s)", found, writer.Process.Pid, os.Args[0])
	skipping := New()
	skipping.skip = append(skipping.skip, writer.Process.Pid)
	found = find(t, skipping, f)
	check.That(t, len(found) == 0, "a process that is left out was found: %v", found)
	check.Must(t, writer.Process.Kill())
	_ = writer.Wait()
	found = find(t, s, f)
	check.That(t, len(found) == 0, "a process that ended was found: %v", found)
}

// TestOwnForksAreNoHolders: whoever starts programs has copies of itself for a moment, which have all that it has open.
func TestOwnForksAreNoHolders(t *testing.T) {
	path, f := image(t)
	file := check.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
	defer func() { check.Must(t, file.Close()) }()
	var programs sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for range 4 {
		programs.Go(func() {
			for ctx.Err() == nil {
				_ = exec.CommandContext(ctx, "true").Run()
			}
		})
	}
	s := New()
	for began := time.Now(); time.Since(began) < time.Second; { // other tests may have many descriptors
		if found := find(t, s, f); len(found) > 0 {
			t.Errorf("found %v", found)
			break
		}
	}
	cancel()
	programs.Wait()
}

// TestSharedScans has many callers ask at once: each learns of his own file, and
// none is answered by a scan that began before he asked.
func TestSharedScans(t *testing.T) {
	s := New()
	paths, files := make([]string, 4), make([]File, 4)
	for i := range files {
		paths[i], files[i] = image(t)
	}
	start(t, "rw", paths[0])
	var group sync.WaitGroup
	for i := range 64 {
		group.Go(func() {
			found, err := s.Find(t.Context(), nil, files[i%4])
			check.That(t, (len(found) > 0) == (i%4 == 0) && (err == nil || errors.Is(err, unix.EACCES)), "file %d: %v, %v", i%4, found, err)
		})
	}
	group.Wait()
	s.turn.Lock() // a scan that is under way
	asked := make(chan []Holder)
	go func() { asked <- find(t, s, files[1]) }()
	start(t, "rw", paths[1])
	s.turn.Unlock()
	found := <-asked
	check.That(t, len(found) == 1, "found %v by the scan that began afterwards", found)
}

func TestFindEndsWithItsCaller(t *testing.T) {
	s := New()
	s.turn.Lock() // a scan that hangs
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	_, err := s.Find(ctx, nil, File{Inode: 1})
	check.That(t, errors.Is(err, context.Canceled), "got %v", err)
	s.turn.Unlock()
}

// fakeProc has one process, whose parts each case makes wrong.
func fakeProc(t *testing.T) (s *Scanner, process string) {
	t.Helper()
	proc := t.TempDir()
	process = filepath.Join(proc, "1")
	check.Must(t, os.MkdirAll(filepath.Join(proc, "self", "ns"), 0o700))
	check.Must(t, os.Symlink(InitialPIDs, filepath.Join(proc, "self", "ns", "pid")))
	for _, dir := range []string{"fd", "fdinfo", "task/1/fd", "task/2/fd", "task/2/fdinfo"} {
		check.Must(t, os.MkdirAll(filepath.Join(process, dir), 0o700))
	}
	check.Must(t, os.WriteFile(filepath.Join(process, "stat"), []byte("1 (a) b) S 0 1 1 0 -1 4194560 0"), 0o600))
	s = New()
	s.proc, s.skip = proc, nil
	return s, process
}

func TestUnknownIsAnError(t *testing.T) {
	path, f := image(t)
	link := func(t *testing.T, dir string) {
		check.Must(t, os.Symlink(path, filepath.Join(dir, "fd", "7")))
	}
	info := func(t *testing.T, dir, text string) {
		check.Must(t, os.WriteFile(filepath.Join(dir, "fdinfo", "7"), []byte(text), 0o600))
	}
	for name, c := range map[string]struct {
		make   func(t *testing.T, process string)
		held   bool
		failed bool
	}{
		"open for writing":          {func(t *testing.T, p string) { link(t, p); info(t, p, "pos:\t0\nflags:\t0100002\n") }, true, false},
		"open for reading":          {func(t *testing.T, p string) { link(t, p); info(t, p, "pos:\t0\nflags:\t0100000\n") }, false, false},
		"a mere name":               {func(t *testing.T, p string) { link(t, p); info(t, p, "flags:\t012000002\n") }, false, false},
		"a first thread that ended": {func(t *testing.T, p string) { link(t, p+"/task/2"); info(t, p+"/task/2", "flags:\t02\n") }, true, false},
		"a descriptor that closed": {func(t *testing.T, p string) {
			check.Must(t, os.Symlink(path+".gone", filepath.Join(p, "fd", "7")))
		}, false, false},
		"flags that cannot be understood": {func(t *testing.T, p string) { link(t, p); info(t, p, "flags:\tyes\n") }, false, true},
		"a descriptor that leads nowhere": {func(t *testing.T, p string) {
			check.Must(t, os.Symlink("7", filepath.Join(p, "fd", "7")))
			info(t, p, "flags:\t02\n")
		}, false, true},
		"one of another inode": {func(t *testing.T, p string) {
			check.Must(t, os.Symlink("7", filepath.Join(p, "fd", "7")))
			info(t, p, "flags:\t02\nino:\t1\n")
		}, false, false},
		"a table that cannot be listed": {func(t *testing.T, p string) {
			check.Must(t, os.RemoveAll(filepath.Join(p, "fd")))
			check.Must(t, os.WriteFile(filepath.Join(p, "fd"), nil, 0o600))
		}, false, true},
		"no processes at all": {func(t *testing.T, p string) { check.Must(t, os.RemoveAll(p)) }, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			s, process := fakeProc(t)
			c.make(t, process)
			found, err := s.Find(t.Context(), nil, f)
			check.That(t, (len(found) > 0) == c.held && (err != nil) == c.failed, "found %v, error %v", found, err)
		})
	}
}

// TestAServerHidesNoOther: the program that serves a device always has it open. That must
// not stand for an answer while another process cannot be looked at.
func TestAServerHidesNoOther(t *testing.T) {
	path, f := image(t)
	s, server := fakeProc(t)
	check.Must(t, os.Symlink("/usr/bin/rbd-nbd", filepath.Join(server, "exe")))
	check.Must(t, os.Symlink(path, filepath.Join(server, "fd", "7")))
	check.Must(t, os.WriteFile(filepath.Join(server, "fdinfo", "7"), []byte("flags:\t02\n"), 0o600))
	servers := []string{"rbd-nbd"}
	found, err := s.Find(t.Context(), servers, f)
	check.That(t, len(found) == 0 && err == nil, "the server alone: %v, %v", found, err)
	other := filepath.Join(s.proc, "4711")
	check.Must(t, os.Mkdir(other, 0o700))
	check.Must(t, os.WriteFile(filepath.Join(other, "fd"), nil, 0o600)) // cannot be listed
	found, err = s.Find(t.Context(), servers, f)
	check.That(t, len(found) == 0 && err != nil, "beside a process that cannot be looked at: %v, %v", found, err)
	found, err = s.Find(t.Context(), nil, f)
	check.That(t, len(found) == 1 && err == nil, "a process that counts: %v, %v", found, err)
}
