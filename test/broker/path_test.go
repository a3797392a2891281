//go:build system

package broker

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestTargetsThatLeadElsewhere(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	outside := filepath.Join(n.dir, "outside")
	check.Must(t, os.MkdirAll(filepath.Join(outside, "mount"), 0o755))
	check.Must(t, os.Symlink(outside, filepath.Join(n.kubelet, "link")))
	check.Must(t, os.Symlink("pods", filepath.Join(n.kubelet, "inner")))
	check.Must(t, os.WriteFile(filepath.Join(n.kubelet, "file"), nil, 0o600))
	full := filepath.Join(n.kubelet, "full")
	check.Must(t, os.MkdirAll(filepath.Join(full, "data"), 0o755))

	for target, want := range map[string]volume.Kind{
		"":                         volume.Invalid,
		"relative/path":            volume.Invalid,
		"/etc":                     volume.Invalid,
		outside + "/mount":         volume.Invalid,
		n.kubelet:                  volume.Invalid,
		n.kubelet + "x/mount":      volume.Invalid,
		n.kubelet + "/../outside":  volume.Invalid,
		n.kubelet + "/a/../../x":   volume.Invalid,
		n.kubelet + "/link":        volume.Denied,
		n.kubelet + "/link/mount":  volume.Denied,
		n.kubelet + "/inner/mount": volume.Denied,
		n.kubelet + "/file":        volume.Invalid,
		n.kubelet + "/file/mount":  volume.Invalid,
		n.kubelet + "/none/mount":  volume.NotFound,
		full:                       volume.Conflict,
		n.kubelet + "/a\x00b":      volume.Invalid,
		n.kubelet + "/a\nb":        volume.Invalid,
		n.kubelet + "/\xff\xfe":    volume.Invalid,
		n.kubelet + "/" + strings.Repeat("a", 256):  volume.Invalid,
		n.kubelet + strings.Repeat("/abcdefg", 600): volume.Invalid,
	} {
		in := n.instruction("pod-1", disk)
		in.Target = target
		_, err := n.Defer(t.Context(), in)
		check.That(t, err != nil && volume.KindOf(err) == want, "%.80q: got %v; want %v", target, err, want)
		check.That(t, err == nil || len(err.Error()) <= 1024, "%.80q: an error that is too long", target)
	}
	n.noLeftovers()
	entries, err := os.ReadDir(outside + "/mount")
	check.That(t, err == nil && len(entries) == 0, "something came to the outside: %v, %v", entries, err)
	// What was refused left no claim behind either.
	n.stage(n.instruction("pod-1", disk))
	n.unstage(n.target("pod-1"))
}

func TestSymlinkedKubeletRoot(t *testing.T) {
	n := parallelNode(t)
	link := filepath.Join(n.dir, "var-lib-kubelet")
	check.Must(t, os.Symlink(n.kubelet, link))
	n.cfg.Root = link
	n.restart()
	in := n.instruction("pod-1", rig.Disk(t, 16*mib, ""))
	resolved := in.Target
	in.Target = link + strings.TrimPrefix(in.Target, n.kubelet)
	v := n.stage(in)
	check.That(t, v.ResolvedTarget == resolved && v.Target == in.Target && v.Key == volume.KeyOf(resolved),
		"target %s resolved to %s", v.Target, v.ResolvedTarget)
	n.unstage(resolved) // either form names it
	n.noLeftovers()
}

// TestTargetSwappedForALink replaces the parent of the target by a link to the
// outside while volumes are staged: a guard must never come to stand outside.
func TestTargetSwappedForALink(t *testing.T) {
	n := newNode(t)
	disk := rig.Disk(t, 16*mib, "")
	in := n.instruction("pod-1", disk)
	parent := filepath.Dir(in.Target)
	outside := filepath.Join(n.dir, "outside")
	check.Must(t, os.MkdirAll(filepath.Join(outside, "mount"), 0o755))
	check.Must(t, os.Symlink(outside, parent+".link"))
	ctx, cancel := context.WithCancel(t.Context())
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for ctx.Err() == nil {
			_ = unix.Renameat2(unix.AT_FDCWD, parent, unix.AT_FDCWD, parent+".link", unix.RENAME_EXCHANGE)
		}
	})
	staged := 0
	for range 500 {
		if _, err := n.Defer(ctx, in); err == nil {
			staged++
		}
		check.Require(t, len(rig.MountPoints(outside)) == 0, "a guard stands outside the kubelet root")
		_, _ = n.Release(ctx, in.Target)
	}
	cancel()
	swapping.Wait()
	check.That(t, staged != 0, "never staged: the test showed nothing")
	if info, err := os.Lstat(parent); err != nil || !info.IsDir() {
		check.Must(t, unix.Renameat2(unix.AT_FDCWD, parent, unix.AT_FDCWD, parent+".link", unix.RENAME_EXCHANGE))
	}
	check.Must(t, check.Err(n.Reconcile(t.Context())))
	n.unstage(in.Target)
	n.noLeftovers()
}

// winnerSet is the targets that got the device.
type winnerSet struct {
	mu      sync.Mutex
	targets map[string]bool
}

func (w *winnerSet) add(target string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.targets[target] = true
}

func TestManyPodsRaceForOneDevice(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	for range 20 {
		won := winnerSet{targets: make(map[string]bool)}
		var racing sync.WaitGroup
		for i := range 8 {
			in := n.instruction("pod-"+string(rune('a'+i)), disk)
			racing.Go(func() {
				if _, err := n.Defer(context.Background(), in); err == nil {
					won.add(in.Target)
				} else if volume.KindOf(err) != volume.InUse {
					t.Error(err)
				}
			})
		}
		racing.Wait()
		winners := 0
		for target := range won.targets {
			winners++
			n.unstage(target)
		}
		check.Require(t, winners == 1, "%d pods have the device", winners)
	}
	n.noLeftovers()
}
