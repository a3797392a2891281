package registry

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestDirectoryThatCannotBeRead is a node without free descriptors for a moment, and one where a directory hangs: no
// driver has gone, and none is taken from kubelet.
func TestDirectoryThatCannotBeRead(t *testing.T) {
	dir := check.ShortDir(t)
	r := New(Config{Registry: dir + "/ours", KubeletRegistry: dir + "/kubelet", Sockets: dir, Log: zap.NewNop(), Front: &world{}})
	gone := 0
	for _, of := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} {
		check.Must(t, os.Mkdir(of, 0o750))
		path := filepath.Join(of, "disk.sock")
		listener := check.Value(net.Listen("unix", path))(t)
		defer func() { _ = listener.Close() }()
		if of == r.cfg.Registry {
			r.sessions[path] = &session{registry: r, socket: path, id: idAt(path), cancel: func() { gone++ }}
		} else {
			r.direct[path] = &bypass{id: idAt(path), cancel: func() { gone++ }}
		}
	}
	check.WithoutDescriptors(t, func() { r.scan(t.Context()) })
	var hung sync.WaitGroup
	answer := make(chan struct{})
	for _, of := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} { // one below each that hangs
		hung.Go(func() { _, _ = sys.Look(&r.looks, of, func() (int, error) { <-answer; return 0, nil }) })
	}
	hung.Wait()
	r.scan(t.Context())
	close(answer)
	check.That(t, gone == 0, "%d sockets count as gone", gone)
	check.That(t, strings.Contains(r.unread, "hangs"), "the log does not say what hangs: %s", r.unread)
	for _, of := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} {
		check.Must(t, os.RemoveAll(of))
	}
	check.Eventually(t, "the directories are listed again", func() bool { r.scan(t.Context()); return gone == 2 })
}

// TestEndpointThatHangs, as a link to a filesystem whose server does not answer, holds up no session, and is not
// connected to.
func TestEndpointThatHangs(t *testing.T) {
	r := New(Config{Log: zap.NewNop(), Front: &world{}})
	r.endpoints.looks.Time = time.Millisecond
	info := &Driver{Name: "driver", Endpoint: check.ShortDir(t) + "/csi.sock"}
	listener := check.Value(net.Listen("unix", info.Endpoint))(t)
	defer func() { _ = listener.Close() }()
	answer := make(chan struct{})
	defer close(answer)
	_, _ = sys.Look(&r.endpoints.looks, info.Endpoint, func() (int, error) { <-answer; return 0, nil })
	link := check.Value(r.reach(info))(t)
	defer func() { _ = link.conn.Close() }()
	check.Fails(t, link.conn.Invoke(t.Context(), "/csi.v1.Identity/Probe", &csi.ProbeRequest{}, &csi.ProbeResponse{}), "it hangs")
	link.reached.Store(&socketID{})
	r.served[info.Name] = &served{}
	r.served[info.Name].driver.Store(link)
	check.That(t, check.Value(r.reach(info))(t) == link, "another socket counts as in its place")
}

// TestDirectoryThatCannotBeReadHidesNoOther has a directory below kubelet's that nobody can
// read, for its path is too long. Drivers that come meanwhile are followed, and those that go.
func TestDirectoryThatCannotBeReadHidesNoOther(t *testing.T) {
	dir := check.ShortDir(t)
	r := New(Config{Registry: dir + "/ours", KubeletRegistry: dir + "/kubelet", Sockets: dir, Log: zap.NewNop(), Front: &world{}})
	r.looks.Time = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	defer func() { cancel(); r.parts.Wait() }()
	check.Must(t, os.MkdirAll(r.cfg.KubeletRegistry, 0o750))
	makeTooLong(t, r.cfg.KubeletRegistry)
	came := make(map[string]net.Listener)
	check.Must(t, os.MkdirAll(r.cfg.Registry, 0o750))
	for _, of := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} {
		path := filepath.Join(of, "disk.sock")
		came[path] = check.Value(net.Listen("unix", path))(t)
	}
	follows := func() int {
		r.scan(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.sessions) + len(r.direct)
	}
	got := follows()
	check.That(t, got == 2, "%d sockets are followed, want 2", got)
	for _, listener := range came {
		check.Must(t, listener.Close())
	}
	got = follows()
	check.That(t, got == 0, "%d sockets are followed that have gone", got)
	check.That(t, check.Err(socketsIn(r.cfg.KubeletRegistry, true, r.notices[""].watch)) != nil, "all directories could be read")
}

// TestStaleRegistrationWhereKubeletsDirectoryHangs: it is left alone until the directory answers, and no lock is held
// meanwhile. What has gone from a listing is known without another look, and no directory of others is touched.
func TestStaleRegistrationWhereKubeletsDirectoryHangs(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.Mkdir(dir+"/below", 0o700))
	ours, theirs := filepath.Join(dir, "disk"+Suffix), filepath.Join(dir, "below", "disk"+Suffix)
	for _, path := range []string{ours, theirs} {
		check.Must(t, os.WriteFile(path, nil, 0o600))
	}
	found := map[string]socketID{ours: idAt(ours), theirs: idAt(theirs)}
	r := New(Config{KubeletRegistry: dir, Log: zap.NewNop()})
	r.looks.Time = time.Millisecond
	answer := make(chan struct{})
	_, _ = sys.Look(&r.looks, dir, func() (int, error) { <-answer; return 0, nil })
	r.dropStale(t.Context(), found)
	check.That(t, exists(ours), "it was removed from a directory that hangs")
	close(answer)
	check.Eventually(t, "it is removed", func() bool { r.dropStale(t.Context(), found); return !exists(ours) })
	check.That(t, exists(theirs), "a socket of others was removed")

	now := &listing{found: found, unread: []string{dir + "/below"}}
	check.That(t, !now.gone(theirs+"2", socketID{}) && now.gone(ours+"2", socketID{}) && now.gone(dir+"/below2", socketID{}), "what has gone")
	for n := range maxListed + 1 { // as by a program that makes any number
		check.Must(t, unix.Mknod(fmt.Sprintf("%s/%d", dir, n), unix.S_IFSOCK|0o600, 0))
	}
	now, err := socketsIn(dir, true, func(string) bool { return true })
	check.That(t, err != nil && len(now.found) == maxListed && !now.gone(ours+"2", socketID{}), "%d of too many are listed: %v", len(now.found), err)
}

// makeTooLong makes directories in one another until their path is longer than the kernel takes.
func makeTooLong(t *testing.T, dir string) {
	t.Helper()
	name := strings.Repeat("x", 200)
	at, err := os.OpenRoot(dir)
	for length := len(dir); err == nil && length <= unix.PathMax; length += len(name) + 1 {
		check.Must(t, at.Mkdir(name, 0o700))
		var below *os.Root
		below, err = at.OpenRoot(name)
		check.Must(t, at.Close())
		at = below
	}
	check.Must(t, err)
	check.Must(t, at.Close())
}
