package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestOneDaemonHasARunDirectory until it ends.
func TestOneDaemonHasARunDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	first := check.Value(lockRunDir(t.Context(), zap.NewNop(), dir, t.TempDir(), 0))(t)
	holder := fmt.Sprintf("process %d (", os.Getpid())
	check.Fails(t, check.Err(lockRunDir(t.Context(), zap.NewNop(), dir, t.TempDir(), 0)), dir, holder) // a second daemon
	core, logged := observer.New(zap.WarnLevel)
	given := check.Begin(func() error {
		second, err := lockRunDir(t.Context(), zap.New(core), dir, t.TempDir(), time.Minute)
		if err == nil {
			second()
		}
		return err
	})
	check.Eventually(t, "a daemon that waits says whose the lock is", func() bool {
		all := logged.All()
		return len(all) == 1 && strings.Contains(all[0].Message, dir) && strings.Contains(fmt.Sprint(all[0].ContextMap()["holder"]), holder)
	})
	first()
	check.Must(t, <-given)
}

func TestWaitingForTheRunDirectoryEnds(t *testing.T) {
	dir := t.TempDir()
	first := check.Value(lockRunDir(t.Context(), zap.NewNop(), dir, t.TempDir(), 0))(t)
	defer first()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	check.Is(t, check.Err(lockRunDir(ctx, zap.NewNop(), dir, t.TempDir(), time.Minute)), context.Canceled) // a daemon that is stopped while it waits
}

// TestOneDaemonHasAKubeletRoot, whatever their run directories are.
func TestOneDaemonHasAKubeletRoot(t *testing.T) {
	root := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	check.Must(t, os.Symlink(root, link))
	first := check.Value(lockRunDir(t.Context(), zap.NewNop(), t.TempDir(), root, 0))(t)
	check.Fails(t, check.Err(lockRunDir(t.Context(), zap.NewNop(), t.TempDir(), link, 0)), link, "of its own", "--now crust-proxy.service crust-proxy-runtime.socket") // a second daemon
	first()
	second := check.Value(lockRunDir(t.Context(), zap.NewNop(), t.TempDir(), link, 0))(t)
	second()
	absent := check.Value(lockRunDir(t.Context(), zap.NewNop(), t.TempDir(), root+"/absent", 0))(t)
	// A root that kubelet has not made yet is one daemon's as well.
	check.Fails(t, check.Err(lockRunDir(t.Context(), zap.NewNop(), t.TempDir(), root+"/absent", 0))) // or two daemons serve a kubelet root that was not there
	absent()
}

// TestNobodyElseKeepsTheDaemonFromStarting: whoever may read a directory can lock it. Nodes
// show kubelet's root to local users, or to the containers of an agent that is not root.
func TestNobodyElseKeepsTheDaemonFromStarting(t *testing.T) {
	runDir, root := t.TempDir(), t.TempDir()
	for _, dir := range []string{runDir, root} {
		readable := check.Value(os.Open(dir))(t)
		defer func() { _ = readable.Close() }()
		check.Must(t, unix.Flock(int(readable.Fd()), unix.LOCK_EX))
	}
	release := check.Value(lockRunDir(t.Context(), zap.NewNop(), runDir, root, 0))(t)
	defer release()
	for _, lock := range []string{runDir + "/daemon.lock", root + "/crust-proxy/daemon.lock"} {
		info, err := os.Stat(lock)
		check.That(t, err == nil && info.Mode() == 0o600, "%s: %v, %v: others can lock it", lock, info, err)
	}
}
