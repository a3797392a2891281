//go:build system

package broker

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// wantOpenIn checks a refusal: it is to be repeated, and names the process.
func wantOpenIn(t *testing.T, err error, by *rig.Holder) {
	t.Helper()
	check.Kind(t, err, volume.Busy, fmt.Sprintf("process %d (%q)", by.Process.Pid, "cat"))
}

// TestReadOnlyVolumesThatEndAtOnceKeepADevice that somebody has: neither may leave it to the
// other to answer for the device. If nobody has it, whichever is the last makes it writable.
func TestReadOnlyVolumesThatEndAtOnceKeepADevice(t *testing.T) {
	t.Parallel()
	n := newMountingNode(t)
	disk := rig.Disk(t, 16*mib, "ext4")
	for handler, use := range map[string]func() (end func()){
		"":     func() func() { return nil },
		"fake": func() func() { return rig.Hold(t, "<", disk).End },
		"host": func() func() {
			point := t.TempDir()
			check.Must(t, unix.Mount(disk, point, "ext4", unix.MS_RDONLY, ""))
			return func() { check.Must(t, unix.Unmount(point, 0)) }
		},
	} {
		for _, pod := range []string{"pod-1", "pod-2"} {
			in := n.instruction(pod, disk, "ro")
			in.Handler = handler
			n.stage(in)
		}
		end := use()
		var both, releases sync.WaitGroup
		both.Add(2)
		n.mounting.retracts, n.runtime.retracts = func() { both.Done(); both.Wait() }, func() { both.Done(); both.Wait() }
		var errs [2]error
		for i, pod := range []string{"pod-1", "pod-2"} {
			target := n.target(pod)
			releases.Go(func() { _, errs[i] = n.Release(t.Context(), target) })
		}
		releases.Wait()
		n.mounting.retracts, n.runtime.retracts = nil, nil
		if err := cmp.Or(errs[0], errs[1]); end == nil {
			check.Must(t, err)
		} else {
			check.Kind(t, err, volume.Busy)
			wantReadOnly(t, disk, true)
			end()
			n.unstage(n.target("pod-1"))
			n.unstage(n.target("pod-2"))
		}
		wantReadOnly(t, disk, false)
	}
	n.noLeftovers()
}

// TestFlagOfAnEarlierBoot is not undone: another device may have the number by now.
func TestFlagOfAnEarlierBoot(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Disk(t, 16*mib, "")
	v := n.stage(n.instruction("pod-1", disk, "ro"))
	n.Close()
	raw, boot := string(check.Value(os.ReadFile(n.recordOf(v)))(t)), check.Value(sys.BootID())(t)
	check.Must(t, os.WriteFile(n.recordOf(v), []byte(strings.Replace(raw, boot, "another", 1)), 0o600))
	n.start()
	n.noLeftovers()
	wantReadOnly(t, disk, true)
}

// TestAnotherDeviceOfTheNumber: after a start, what has the number of a volume's device by now is not that volume's,
// whoever reads or writes it. It does not run beside tests that could get the number.
func TestAnotherDeviceOfTheNumber(t *testing.T) {
	t.Run("writer", func(t *testing.T) { testAnotherDevice(t) })
	t.Run("reader", func(t *testing.T) { testAnotherDevice(t, "ro") })
}

func testAnotherDevice(t *testing.T, flags ...string) {
	n, store := newNode(t), &fdStore{files: make(map[string]*os.File)}
	disk := rig.Disk(t, 16*mib, "")
	v := n.stage(n.instruction("pod-1", disk, "ro"))
	n.Close()
	check.Must(t, loopdev.Detach(disk))
	other := check.Value(os.OpenFile(rig.Image(t, 16*mib), os.O_RDWR, 0))(t)
	t.Cleanup(func() { check.Must(t, errors.Join(loopdev.DetachFrom(other.Name(), disk), other.Close())) })
	check.Eventually(t, "its number is free", func() bool {
		if _, err := os.Stat("/sys/block" + strings.TrimPrefix(disk, "/dev") + "/loop"); err == nil {
			return false // also if it is somebody else's by now
		}
		loop := check.Value(os.OpenFile(disk, os.O_RDWR, 0))(t)
		err := unix.IoctlLoopConfigure(int(loop.Fd()), &unix.LoopConfig{Fd: uint32(other.Fd())})
		if err == nil {
			err = unix.IoctlSetPointerInt(int(loop.Fd()), unix.BLKROSET, 0)
		}
		return errors.Join(err, loop.Close()) == nil
	})
	n.cfg.Keeper = store
	n.startWith(store)
	wantReadOnly(t, disk, false)
	wantHeld(t, disk, false)
	second := n.stage(n.instruction("pod-2", disk, flags...))
	rig.Hold(t, "<", disk)
	for range 16 { // the volumes are taken up in any order
		check.Must(t, check.Err(n.Reconcile(t.Context())))
		status, _ := n.Get(v.Key)
		check.That(t, errors.Is(status.Problem, claim.ErrReplaced), "the volume is shown with %v", status.Problem)
		check.That(t, !n.runtime.published[v.Key], "a sandbox of the volume can find the other device")
		status, _ = n.Get(second.Key)
		check.That(t, status.Problem == nil, "the other volume is shown with %v", status.Problem)
		n.restartWith(store)
	}
	n.unstage(v.Target)
	wantHeld(t, disk, true)
	check.Kind(t, check.Err(n.Release(t.Context(), second.Target)), volume.Busy)
}

// TestReleaseByForceConcernsOneDevice has the number of a device that two readers released by force stand
// for another image by now, which somebody uses.
func TestReleaseByForceConcernsOneDevice(t *testing.T) {
	n := parallelNode(t)
	disk := rig.Loop(t, rig.Image(t, 16*mib), loopdev.Options{ReadOnly: true})
	v, second := n.stage(n.instruction("pod-1", disk, "ro")), n.stage(n.instruction("pod-2", disk, "ro"))
	rig.Hold(t, "<", disk)
	for _, key := range []volume.Key{v.Key, second.Key} {
		check.Must(t, check.Err(n.ReleaseKey(t.Context(), key, true)))
	}
	held := n.Users().Held()
	check.That(t, len(held) == 2, "two readers were released by force, and held are %+v", held)
	if claim.SequenceOf(v.Device) == "" {
		rig.Missing(t, "the kernel's diskseq")
	}
	loop := check.Value(os.Open(disk))(t)
	other := check.Value(os.Open(rig.Image(t, 16*mib)))(t)
	const changeFD = 0x4C06 // LOOP_CHANGE_FD of the kernel's <linux/loop.h>
	check.Must(t, unix.IoctlSetInt(int(loop.Fd()), changeFD, int(other.Fd())))
	check.Must(t, errors.Join(loop.Close(), other.Close()))
	t.Cleanup(func() { check.Must(t, loopdev.Detach(disk)) }) // it is no longer the one that was made
	n.restart()
	held = n.Users().Held()
	check.That(t, len(held) == 0, "another image at the same number is held: %+v", held)
	left, err := os.ReadDir(n.cfg.StateDir + "/held")
	check.That(t, len(left) == 0 && err == nil, "records are left: %v, %v", left, err)
}
