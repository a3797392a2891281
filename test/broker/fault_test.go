//go:build system

package broker

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestFullStateDirectory(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	first := n.stage(n.instruction("pod-1", disk))
	small := rig.Tmpfs(t, "size=64k")
	check.Must(t, os.CopyFS(small, os.DirFS(n.cfg.StateDir)))
	n.Close()
	n.cfg.StateDir = small
	n.start()
	check.Must(t, errIgnoring(unix.ENOSPC, os.WriteFile(filepath.Join(small, "fill"), make([]byte, 1<<20), 0o600)))
	check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-2", rig.Disk(t, 16*mib, "")))), volume.Exhausted, "pod-2", small)
	n.restart()
	status, ok := n.Get(first.Key)
	check.That(t, ok && status.Problem == nil, "the old volume suffered: %+v", status)
	// Removing needs no room.
	n.unstage(first.Target)
	check.Must(t, os.Remove(filepath.Join(small, "fill")))
	n.noLeftovers()
}

func errIgnoring(ignored, err error) error {
	if errors.Is(err, ignored) {
		return nil
	}
	return err
}

func TestReconcileRebuildsWhatIsMissing(t *testing.T) {
	n := parallelNode(t)
	in := n.instruction("pod-1", rig.Disk(t, 16*mib, ""))
	v := n.stage(in)
	check.Must(t, unix.Unmount(in.Target, unix.MNT_DETACH))
	n.runtime.published = nil
	report := check.Value(n.Reconcile(t.Context()))(t)
	want := []deferral.Repair{{Volume: v, Action: "mount guard"}, {Volume: v, Action: "publish to runtime"}}
	check.That(t, slices.Equal(report.Repairs, want), "repairs: %+v", report.Repairs)
	report = check.Value(n.Reconcile(t.Context()))(t)
	check.That(t, len(report.Repairs) == 0, "nothing is missing, and repaired was %+v", report.Repairs)
	check.That(t, len(rig.MountPoints(in.Target)) == 1 && n.runtime.published[v.Key], "guard or projection was not rebuilt")
	n.unstage(in.Target)
	n.noLeftovers()
}

// A guard that was found whole is not examined anew while nothing about it has changed.
func TestReconcileSeesWhatBecameOfAGuard(t *testing.T) {
	n := parallelNode(t)
	unmount := func(target string) error { return unix.Unmount(target, unix.MNT_DETACH) }
	other := n.stage(n.instruction("pod-other", rig.Disk(t, 16*mib, ""))).Target
	cases := map[string]struct {
		change, undo func(target string) error // it is repaired if nothing has to be undone
	}{
		"pod-unmounted": {unmount, nil},
		"pod-covered":   {func(target string) error { return unix.Mount(other, target, "", unix.MS_BIND, "") }, unmount},
		"pod-renamed": {
			func(target string) error { return os.Rename(filepath.Dir(target), filepath.Dir(target)+".moved") },
			func(target string) error { return os.Rename(filepath.Dir(target)+".moved", filepath.Dir(target)) },
		},
		"pod-emptied": {
			func(target string) error {
				return errors.Join(clearFlags(filepath.Join(target, notice)), os.Remove(filepath.Join(target, notice)))
			}, unmount,
		},
	}
	targets := make(map[string]string)
	for name := range cases {
		targets[name] = n.stage(n.instruction(name, rig.Disk(t, 16*mib, ""))).Target
	}
	time.Sleep(1100 * time.Millisecond) // the kernel's times are coarse
	check.Value(n.Reconcile(t.Context()))(t)
	for name, c := range cases {
		check.Must(t, c.change(targets[name]))
	}
	repairs := make(map[string]error)
	for _, r := range check.Value(n.Reconcile(t.Context()))(t).Repairs {
		repairs[r.Volume.Target] = r.Err
	}
	check.Equal(t, len(repairs), len(cases), "repairs")
	for name, c := range cases {
		err, repaired := repairs[targets[name]]
		check.That(t, repaired && (err == nil) == (c.undo == nil), "%s: repaired: %t, %v", name, repaired, err)
		if c.undo != nil {
			check.Must(t, c.undo(targets[name]))
		}
		n.unstage(targets[name])
	}
	n.unstage(other)
	n.noLeftovers()
}

func TestLostRecordsLeaveNoGuards(t *testing.T) {
	n := parallelNode(t)
	in := n.instruction("pod-1", rig.Disk(t, 16*mib, ""))
	n.stage(in)
	n.Close()
	check.Must(t, os.RemoveAll(n.cfg.StateDir))
	n.runtime.published = nil
	n.start() // reconciles
	check.Empty(t, rig.MountPoints(n.kubelet), "stray guards stay")
	n.unstage(in.Target)
	n.noLeftovers()
}
