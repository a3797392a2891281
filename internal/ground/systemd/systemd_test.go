package systemd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) {
	if os.Getenv("SYSTEMD_TEST_CHILD") != "" {
		os.Exit(child())
	}
	goleak.VerifyTestMain(m)
}

// message is what a service manager receives.
type message struct {
	state string
	files []*os.File
}

// manager is a service manager's end of the notify socket.
type manager struct {
	conn *net.UnixConn
	path string
}

func newManager(t *testing.T) *manager {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn := check.Value(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(t)
	t.Cleanup(func() { _ = conn.Close() })
	return &manager{conn: conn, path: path}
}

func (m *manager) receive(t *testing.T) message {
	t.Helper()
	_ = m.conn.SetReadDeadline(time.Now().Add(time.Minute))
	text, rights := make([]byte, 4096), make([]byte, 1024)
	n, rn, _, _, err := m.conn.ReadMsgUnix(text, rights)
	if err != nil {
		t.Error(err)
		return message{}
	}
	got := message{state: string(text[:n])}
	control := check.Value(unix.ParseSocketControlMessage(rights[:rn]))(t)
	for _, c := range control {
		if c.Header.Type != unix.SCM_RIGHTS {
			continue // who sent it
		}
		fds := check.Value(unix.ParseUnixRights(&c))(t)
		for _, fd := range fds {
			got.files = append(got.files, os.NewFile(uintptr(fd), "received")) //nolint:gosec // a descriptor
		}
	}
	return got
}

func (m *message) close() {
	for _, file := range m.files {
		_ = file.Close()
	}
}

func (m *manager) notifier(t *testing.T) *Notifier {
	t.Helper()
	t.Setenv("NOTIFY_SOCKET", m.path)
	t.Setenv("WATCHDOG_USEC", "")
	t.Setenv("FDSTORE", "512")
	return check.Value(FromEnvironment())(t)
}

func TestMessages(t *testing.T) {
	m := newManager(t)
	n := m.notifier(t)
	for _, tc := range []struct {
		send func() error
		want string
	}{
		{n.Ready, "READY=1"},
		{n.Stopping, "STOPPING=1"},
	} {
		check.Must(t, tc.send())
		got := m.receive(t)
		check.That(t, got.state == tc.want, "got %q, want %q", got.state, tc.want)
	}
}

// TestRoom: systemd says how many descriptors it keeps since version 254.
func TestRoom(t *testing.T) {
	m := newManager(t)
	check.Equal(t, m.notifier(t).Room(), 512, "room")
	t.Setenv("NOTIFY_SOCKET", m.path)
	n, err := FromEnvironment()
	check.That(t, err == nil && n.Room() == unitRoom, "not told: %d, %v", n.Room(), err)
	unit, err := os.ReadFile("../../../systemd/crust-proxy.service")
	check.That(t, err == nil && strings.Contains(string(unit), fmt.Sprintf("\nFileDescriptorStoreMax=%d\n", unitRoom)),
		"the unit does not keep %d descriptors: %v", unitRoom, err)
}

func TestEnvironmentIsUnset(t *testing.T) {
	newManager(t).notifier(t)
	for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE"} {
		value, ok := os.LookupEnv(name)
		check.That(t, !ok, "%s=%s is left", name, value)
	}
}

func TestWithoutManagerNothingHappens(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	t.Setenv("WATCHDOG_USEC", "")
	n := check.Value(FromEnvironment())(t)
	err := errors.Join(n.Ready(), n.Stopping(), n.StoreFD("a", os.Stderr), n.RemoveFD("a"))
	check.That(t, err == nil && !n.CanStore(), "got %v, %+v", err, n)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	check.Must(t, (&Watchdog{Notifier: n, Log: zap.NewNop()}).Run(ctx))
}

func TestStoreFD(t *testing.T) {
	m := newManager(t)
	n := m.notifier(t)
	file := check.Value(os.Create(filepath.Join(t.TempDir(), "claimed")))(t)
	defer func() { _ = file.Close() }()
	var processed atomic.Bool
	served := make(chan message, 1)
	go func() {
		stored := m.receive(t)
		barrier := m.receive(t)
		time.Sleep(50 * time.Millisecond)
		processed.Store(true)
		check.That(t, barrier.state == "BARRIER=1" && len(barrier.files) == 1, "the barrier is %+v", barrier)
		barrier.close()
		served <- stored
	}()
	check.Must(t, n.StoreFD("claim-8-16", file))
	check.That(t, processed.Load(), "it returned before the manager had processed it")
	stored := <-served
	defer stored.close()
	check.Require(t, stored.state == "FDSTORE=1\nFDNAME=claim-8-16\nFDPOLL=0" && len(stored.files) == 1, "got %+v", stored)
	ours, _ := file.Stat()
	theirs, err := stored.files[0].Stat()
	check.That(t, err == nil && os.SameFile(ours, theirs), "another file was stored: %v", err)
}

func TestRemoveFD(t *testing.T) {
	m := newManager(t)
	n := m.notifier(t)
	go func() {
		got := m.receive(t)
		check.That(t, got.state == "FDSTOREREMOVE=1\nFDNAME=claim" && len(got.files) == 0, "got %+v", got)
		barrier := m.receive(t)
		barrier.close()
	}()
	check.Must(t, n.RemoveFD("claim"))
}

func TestBadNamesAreRefused(t *testing.T) {
	n := newManager(t).notifier(t)
	for _, name := range []string{"", "a:b", "a\nREADY=1", "a_b", "ä", strings.Repeat("a", 256)} {
		check.That(t, n.StoreFD(name, os.Stderr) != nil && n.RemoveFD(name) != nil, "%q is taken", name)
	}
}

func TestManagerThatIsAway(t *testing.T) {
	m := newManager(t)
	n := m.notifier(t)
	_ = m.conn.Close()
	check.Fails(t, n.StoreFD("a", os.Stderr), "store the descriptor a")
}

func TestWatchdog(t *testing.T) {
	m := newManager(t)
	t.Setenv("WATCHDOG_USEC", "20000")
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	t.Setenv("NOTIFY_SOCKET", m.path)
	n := check.Value(FromEnvironment())(t)
	var dead atomic.Bool
	core, logged := observer.New(zap.ErrorLevel)
	dog := &Watchdog{Notifier: n, Log: zap.New(core), Alive: func(context.Context) error {
		if dead.Load() {
			return errors.New("stuck")
		}
		return nil
	}}
	stop := check.Running(t, dog.Run)
	for range 3 {
		got := m.receive(t)
		check.That(t, got.state == "WATCHDOG=1", "got %q", got.state)
	}
	dead.Store(true)
	check.Eventually(t, "it is logged", func() bool { return logged.Len() > 0 })
	drain(m)
	_ = m.conn.SetReadDeadline(time.Now().Add(60 * time.Millisecond))
	_, err := m.conn.Read(make([]byte, 64))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "a dead daemon said that it lives: %v", err)
	stop()
}

func drain(m *manager) {
	for range 1000 { // more than a socket holds
		_ = m.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // one that is over fails a read also if there is something
		if _, err := m.conn.Read(make([]byte, 64)); err != nil {
			return
		}
	}
}

// TestInherit starts this test program as systemd starts a service: with descriptors from 3 on.
func TestInherit(t *testing.T) {
	listener := check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "runtime.sock"), Net: "unix"}))(t)
	defer func() { _ = listener.Close() }()
	socket := check.Value(listener.File())(t)
	defer func() { _ = socket.Close() }()
	claim := check.Value(os.Create(filepath.Join(t.TempDir(), "claim")))(t)
	defer func() { _ = claim.Close() }()
	for names, want := range map[string]string{
		"runtime:claim-8-16:claim-8-16": "listeners=runtime stored=claim-8-16",
		"claim-1:claim-2:claim-3":       "listeners= stored=claim-1,claim-2,claim-3",
		"runtime:admin:claim":           `error: the socket "admin"`,
		"runtime:claim:runtime":         `error: systemd passed two sockets named "runtime"`,
	} {
		files := []*os.File{socket, claim, claim}
		if strings.HasSuffix(names, ":runtime") {
			files[2] = socket
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0]) //nolint:gosec // this very program
		cmd.Env = append(os.Environ(), "SYSTEMD_TEST_CHILD=1", "LISTEN_FDS=3", "LISTEN_FDNAMES="+names)
		cmd.ExtraFiles = files
		out, err := cmd.CombinedOutput()
		check.That(t, err == nil && strings.HasPrefix(string(out), want), "%s: got %q, %v; want %q", names, out, err, want)
	}
}

// child says what it inherited. LISTEN_PID can only be known by itself.
func child() int {
	_ = os.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()))
	in, err := Inherit("runtime", "admin")
	if err != nil {
		fmt.Println("error:", strings.ReplaceAll(err.Error(), "\n", "; "))
		return 0
	}
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		if _, ok := os.LookupEnv(name); ok {
			fmt.Println("left:", name)
			return 1
		}
	}
	fmt.Printf("listeners=%s stored=%s", names(in.Listeners), names(in.Stored))
	if in.Close() != nil {
		return 1
	}
	return 0
}

func names[V any](of map[string]V) string { return strings.Join(slices.Sorted(maps.Keys(of)), ",") }
