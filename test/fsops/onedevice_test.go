//go:build system

package fsops_test

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestJournalByADefaultMountOption has the kernel write the journal of an ext4 to another
// device that only the default mount options in the superblock name.
func TestJournalByADefaultMountOption(t *testing.T) {
	rig.Need(t, "debugfs")
	device := rig.Loop(t, rig.Image(t, 64*mib), loopdev.Options{})
	theirs := rig.Loop(t, rig.Image(t, 64*mib), loopdev.Options{})
	var st unix.Stat_t
	check.Must(t, unix.Stat(theirs, &st))
	rig.Command(t, "mke2fs", "-q", "-b", "4096", "-O", "journal_dev", theirs)
	rig.Command(t, "mke2fs", "-q", "-t", "ext4", "-b", "4096", "-J", "device="+theirs, device)
	rig.Command(t, "debugfs", "-w", "-R", "ssv journal_dev 0", device)
	number := unix.Major(st.Rdev)<<8 | unix.Minor(st.Rdev)
	rig.Command(t, "tune2fs", "-f", "-E", fmt.Sprintf("mount_opts=journal_dev=%d", number), device)

	check.Fails(t, fsops.OneDevice(openFD(t, device, unix.O_RDONLY), "ext4"), "journal on another device")
	// Whoever mounts it for a pod has asked before.
	if mount, err := fsmount.Mount(abi.Info{Device: device, FSType: "ext4"}, openFD(t, device, unix.O_RDONLY), nil); err == nil {
		t.Error("it is mounted for a pod")
		check.Must(t, unix.Close(mount))
	}
	mounted(t, "ext4", device, 0, "")
	check.That(t, rig.Exclusive(theirs) != nil, "the kernel does not use the other device: this test shows nothing")
}
