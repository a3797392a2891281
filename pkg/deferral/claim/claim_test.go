package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestClaimNamesFitTheEnvironment: systemd passes the names of all descriptors in one
// string, and a service whose string is longer than the kernel's limit never starts.
func TestClaimNamesFitTheEnvironment(t *testing.T) {
	const most = 16384 // FileDescriptorStoreMax= of the unit
	start := func(name func(id identity) string) error {
		names, seen := []string{"runtime", "admin"}, map[string]bool{"runtime": true, "admin": true}
		for i := range uint32(most) {
			// The largest numbers that block devices have: majors end at 511.
			one := name(identityOf(blockDevice(unix.Mkdev(511, 1<<20-1-i))))
			if seen[one] {
				t.Fatalf("%s is not unique", one)
			}
			seen[one] = true
			names = append(names, one)
		}
		cmd := exec.Command("true")
		cmd.Env = []string{"LISTEN_FDNAMES=" + strings.Join(names, ":")}
		return cmd.Run()
	}
	if err := start(claimName); err != nil {
		t.Error(err)
	}
	old := func(id identity) string { return "claim-" + fmt.Sprintf("b%d-%d", id.Major, id.Minor) }
	if err := start(old); !errors.Is(err, unix.E2BIG) {
		t.Errorf("this test cannot fail: names of the old form gave %v", err)
	}
}

func block(major, minor uint32) identity {
	return identity{Block: true, Major: major, Minor: minor}
}

func TestClaimNames(t *testing.T) {
	for id, want := range map[identity]string{
		block(8, 16): "4ZSW", block(7, 0): "4D8G", {Major: 8, Minor: 1, Inode: 2}: "", block(4095, 1<<20-1): "1Z141Z3",
	} {
		if got := claimName(id); want != "" && got == "" || want == "" && got != "" {
			t.Errorf("%v: %q", id, got)
		}
	}
	if claimName(block(8, 1)) == claimName(block(8, 2)) || claimName(block(1, 0)) == claimName(block(0, 1)) {
		t.Error("names are not unique")
	}
}

// keptNames is a keeper that remembers names only.
type keptNames map[string]bool

func (k keptNames) StoreFD(name string, _ *os.File) error { k[name] = true; return nil }
func (k keptNames) RemoveFD(name string) error            { delete(k, name); return nil }

// TestClaimsOfAnOlderVersionAreRenamed when they are taken up, so that an upgrade alone
// makes the next start possible.
func TestClaimsOfAnOlderVersionAreRenamed(t *testing.T) {
	if os.Geteuid() != 0 && os.Getenv("CI") != "true" {
		t.Skip("a block device node can be made by root only")
	}
	path := filepath.Join(t.TempDir(), "loop")
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(240, 77))); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a"}
	v.Device = volume.Device{Kind: volume.BlockDevice, Path: path, Major: 240, Minor: 77}
	keeper := keptNames{"claim-b240-77": true, "claim-b240-78": true}
	c := NewTable(keeper, map[string]*os.File{"claim-b240-77": os.NewFile(uintptr(fd), "kept")}, nil)
	t.Cleanup(c.Close)
	if err := c.Reclaim(t.Context(), Request{Volume: v}); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprint(keptNames{claimName(identityOf(v.Device)): true, "claim-b240-78": true})
	if got := fmt.Sprint(keeper); got != want {
		t.Errorf("kept: %v, want %v", got, want)
	}
}

// brokenKeeper is a systemd that does not answer in time, and has done all the same what
// it was asked to store.
type brokenKeeper struct {
	keptNames
	broken bool
}

func (k *brokenKeeper) answer() error {
	if k.broken {
		return errors.New("it did not answer")
	}
	return nil
}

func (k *brokenKeeper) StoreFD(name string, file *os.File) error {
	return errors.Join(k.keptNames.StoreFD(name, file), k.answer())
}

func (k *brokenKeeper) RemoveFD(name string) error {
	if k.broken {
		return k.answer()
	}
	return k.keptNames.RemoveFD(name)
}

// heldAs has a device held that is none: no test without root has a device.
func heldAs(t *testing.T, c *Table, d volume.Device) error {
	t.Helper()
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return c.open.add(identityOf(d), &heldDevice{fd: fd, device: d})
}

// TestKeptClaimsAreGivenUpInTheEnd: a copy that stayed with systemd would keep the device
// from its driver, and from every pod, until the daemon is restarted.
func TestKeptClaimsAreGivenUpInTheEnd(t *testing.T) {
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", Device: volume.Device{Kind: volume.BlockDevice, Major: 240, Minor: 77}}
	for name, last := range map[string]func(c *Table) error{
		"by the repeated release": func(c *Table) error { return c.Release(Request{Volume: v}, nil) },
		"by reconcile":            func(c *Table) error { c.DropKept(t.Context(), nil); return nil },
	} {
		for _, from := range []string{"store", "remove"} {
			t.Run(name+" after a failed "+from, func(t *testing.T) {
				keeper := &brokenKeeper{keptNames: keptNames{}, broken: from == "store"}
				c := NewTable(keeper, nil, nil)
				t.Cleanup(c.Close)
				if err := heldAs(t, c, v.Device); (err != nil) != keeper.broken {
					t.Fatal(err)
				}
				keeper.broken = true
				if err := c.Release(Request{Volume: v}, nil); volume.KindOf(err) != volume.Busy {
					t.Errorf("a release that failed: %v", err)
				}
				keeper.broken = false
				if err := last(c); err != nil || len(keeper.keptNames) > 0 || c.Kept() != 0 {
					t.Errorf("%v, and kept are %v (%d)", err, keeper.keptNames, c.Kept())
				}
			})
		}
	}
}

// TestLeftoverOfAReleaseIsNoOwner: a device is looked at for its first owner, also if an
// earlier release could not be completed.
func TestLeftoverOfAReleaseIsNoOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", Device: Identify(path)}
	c := NewTable(nil, nil, nil)
	t.Cleanup(c.Close)
	if err := heldAs(t, c, v.Device); err != nil {
		t.Fatal(err)
	}
	prepared := false
	_, err := c.Acquire(t.Context(), Request{Volume: v}, &OpenedDevice{Device: v.Device, known: true},
		func(context.Context) error { prepared = true; return nil })
	if err != nil || !prepared {
		t.Errorf("prepared %v, %v", prepared, err)
	}
}

// TestKeptClaimOfALostVolume: nobody knows any more which volume had the device, and a
// sandbox may still write to it.
func TestKeptClaimOfALostVolume(t *testing.T) {
	path := filepath.Join(t.TempDir(), "device")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open := func() *os.File {
		file, err := os.OpenFile(path, os.O_RDWR, 0) //nolint:gosec // this test's own
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	vmm := exec.CommandContext(t.Context(), "sleep", "1000")
	device := open()
	vmm.Stdin = device
	if err := vmm.Start(); err != nil {
		t.Fatal(err)
	}
	_ = device.Close()
	users := NewUsers(func() []string { return nil }, func(volume.Key) {})
	c := NewTable(nil, map[string]*os.File{"LOST": open()}, users)
	t.Cleanup(c.Close)
	if c.DropKept(t.Context(), nil); c.Kept() != 1 {
		t.Error("the claim on a device that a process has open was given up")
	}
	_ = vmm.Process.Kill()
	_ = vmm.Wait()
	want := 0
	if os.Getuid() != 0 {
		want = 1 // processes of others cannot be examined
	}
	if c.DropKept(t.Context(), nil); c.Kept() != want {
		t.Errorf("%d claims are kept on a device that nobody has open, and should be %d", c.Kept(), want)
	}
}
