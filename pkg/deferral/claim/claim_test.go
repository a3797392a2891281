package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/fuse"
)

// TestClaimNamesFitTheEnvironment: systemd passes the names of all descriptors in one
// string, and a service whose string is longer than the kernel's limit never starts.
func TestClaimNamesFitTheEnvironment(t *testing.T) {
	const most = 16384 // FileDescriptorStoreMax= of the unit
	start := func(name func(id identity) string) error {
		names, seen := []string{"runtime", "admin"}, map[string]bool{"runtime": true, "admin": true}
		for i := range uint32(most) {
			// The largest numbers that block devices have: majors end at 511.
			one := name(block(511, 1<<20-1-i))
			check.Require(t, !seen[one], "%s is not unique", one)
			seen[one] = true
			names = append(names, one)
		}
		cmd := exec.Command("true")
		cmd.Env = []string{"LISTEN_FDNAMES=" + strings.Join(names, ":")}
		return cmd.Run()
	}
	check.Must(t, start(claimName))
	old := func(id identity) string { return "claim-" + fmt.Sprintf("b%d-%d", id.Major, id.Minor) }
	check.Is(t, start(old), unix.E2BIG) // or this test cannot fail
}

func block(major, minor uint32) identity { return identity{Block: true, Major: major, Minor: minor} }

func TestClaimNames(t *testing.T) {
	check.That(t, claimName((identity{Major: 8, Minor: 1, Inode: 2})) == "", "an image is kept")
	check.That(t, claimName(block(8, 1)) != claimName(block(8, 2)) && claimName(block(1, 0)) != claimName(block(0, 1)), "names are not unique")
}

// keptNames is a keeper that remembers names only.
type keptNames map[string]bool

func (k keptNames) StoreFD(name string, _ *os.File) error { k[name] = true; return nil }
func (k keptNames) RemoveFD(name string) error            { delete(k, name); return nil }

// TestClaimOfWhichAPartIsMissing: what is under a kept loop device is found out later, and the claim stays until then.
func TestClaimOfWhichAPartIsMissing(t *testing.T) {
	check.NeedsRoot(t)
	path := filepath.Join(t.TempDir(), "device")
	check.Must(t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(7, 4077))))
	fd := check.Value(unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0))(t)
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a"}
	v.Device = volume.Device{Kind: volume.BlockDevice, Path: path, Major: 7, Minor: 4077}
	name, finder := claimName(identityOf(v.Device)), &fakeOpeners{under: []openers.File{}}
	table := newTable(t, keptNames{name: true}, map[string]*os.File{name: os.NewFile(uintptr(fd), "kept")}, finder)
	for range 2 {
		err := table.Reclaim(t.Context(), Request{Volume: v})
		check.That(t, err != nil && !table.Has(Request{Volume: v}), "claimed without what is under it: %v", err)
		check.That(t, table.Kept() == 1 && len(table.owners.owned(v.Key)) == 1, "the claim was given up")
	}
	finder.under = []openers.File{{Major: 8, Inode: 5}}
	check.Must(t, table.Reclaim(t.Context(), Request{Volume: v}))
	check.That(t, table.Has(Request{Volume: v}) && slices.Contains(table.owners.owned(v.Key), finder.under[0]), "a part is still missing")
}

// TestDeviceOfAVolumeThatIsNotClaimedYet goes to nobody else, by its number or its name, and nobody waits for it.
func TestDeviceOfAVolumeThatIsNotClaimedYet(t *testing.T) {
	v, dev := imageOf(t)
	v.ReadOnly = true
	byName := dev.Device
	byName.Inode++
	c := newTable(t, nil, nil, &fakeOpeners{})
	c.Expect(Request{Volume: v})
	unlock := check.Value(c.lock(t.Context(), v, identityOf(v.Device)))(t) // as the call that hangs
	refused := func(d volume.Device) {
		t.Helper()
		other := &volume.Volume{Key: volume.KeyOf("/b"), Target: "/b", ReadOnly: true, Device: d}
		_, err := c.Begin(t.Context(), Request{Volume: other}, &OpenedDevice{Device: d, FD: sys.NoFD})
		owned, is := errors.AsType[*OwnedError](err)
		check.That(t, is && owned.Target == "/a" && volume.KindOf(err) == volume.InUse, "%v: %v", d, err)
	}
	refused(dev.Device)
	refused(byName)
	check.That(t, !c.Has(Request{Volume: v}), "what is expected is not claimed yet")
	unlock()
	check.Must(t, c.Reclaim(t.Context(), Request{Volume: v}))
	check.That(t, c.Has(Request{Volume: v}), "it was not claimed")
	check.Must(t, c.owners.refuseExpected(&volume.Volume{Key: "b", Device: byName}))
	c = newTable(t, nil, nil, &fakeOpeners{})
	c.Expect(Request{Volume: v})
	check.Must(t, c.Release(Request{Volume: v}, nil))
	check.Must(t, c.owners.refuseExpected(&volume.Volume{Key: "b", Device: byName}))
}

// TestReleaseOfAReplacedDevice says nothing of the other device, which another volume has had.
func TestReleaseOfAReplacedDevice(t *testing.T) {
	c, d := newTable(t, nil, nil, &fakeOpeners{}), numberedDevice(t)
	c.users.Force(Held{Volume: &volume.Volume{Key: "b", Device: d}, Sequence: SequenceOf(d)}, func(*volume.Volume) {})
	check.Must(t, c.RefuseUsed(t.Context(), Request{Volume: &volume.Volume{Key: "a", Device: d}, Sequence: "0"}, 0))
	check.That(t, len(c.users.Forced()) == 1, "what another volume released by force is forgotten")
}

// numberedDevice is some device whose attachment the kernel has numbered.
func numberedDevice(t *testing.T) volume.Device {
	numbers, _ := filepath.Glob(blockDevices + "*/diskseq")
	check.Needs(t, len(numbers) > 0, "a kernel that numbers attachments")
	d := volume.Device{Kind: volume.BlockDevice}
	check.Value(fmt.Sscanf(filepath.Base(filepath.Dir(numbers[0])), "%d:%d", &d.Major, &d.Minor))(t)
	return d
}

// TestDataOfAVolumeThatIsNotClaimedYet goes to nobody else by another device either: the proof is asked about its loop
// device, which nobody may have open.
func TestDataOfAVolumeThatIsNotClaimedYet(t *testing.T) {
	finder := &fakeOpeners{}
	c := newTable(t, nil, nil, finder)
	expected := &volume.Volume{Key: "b", Target: "/b", Device: deviceAs(block(7, 4077))}
	c.Expect(Request{Volume: expected})
	v, dev := imageOf(t)
	claim := func() {
		t.Helper()
		p := check.Value(c.Begin(t.Context(), Request{Volume: v}, dev))(t)
		check.Must(t, p.Claim(t.Context()))
	}
	claim()
	check.That(t, slices.Equal(finder.query.Expected, []openers.File{identityOf(expected.Device)}), "expected are %v", finder.query.Expected)
	both := *v
	both.ReadOnly, expected.ReadOnly = true, true
	check.That(t, c.owners.expectedLoops(&both) == nil, "readers exclude each other")
}

// TestKeptClaimIsTakenUp without asking the keeper, and with what lies under a loop device.
func TestKeptClaimIsTakenUp(t *testing.T) {
	check.NeedsRoot(t)
	image := openers.File{Major: 8, Inode: 5}
	for _, c := range []struct {
		major  uint32
		broken bool // the keeper does not answer
	}{{240, false}, {240, true}, {7, false}} {
		path := filepath.Join(t.TempDir(), "device")
		check.Must(t, unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(c.major, 77))))
		fd := check.Value(unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0))(t)
		v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a"}
		v.Device = volume.Device{Kind: volume.BlockDevice, Path: path, Major: c.major, Minor: 77}
		name := claimName(identityOf(v.Device))
		keeper := &brokenKeeper{keptNames: keptNames{name: true, "OTHER": true}, broken: c.broken}
		table := newTable(t, keeper, map[string]*os.File{name: os.NewFile(uintptr(fd), "kept")}, &fakeOpeners{under: []openers.File{image}})
		check.NoError(t, table.Reclaim(t.Context(), Request{Volume: v}), "%+v", c)
		got, want := fmt.Sprint(keeper.keptNames), fmt.Sprint(keptNames{name: true, "OTHER": true})
		check.That(t, c.broken || got == want, "%+v: kept: %v, want %v", c, got, want)
		check.Equal(t, slices.Contains(table.owners.owned(v.Key), image), c.major == 7, "%+v: the volume owns the image", c)
	}
}

func TestNumbersOfDevices(t *testing.T) {
	for text, valid := range map[string]bool{"7:3": true, "x:3": false, "7:x": false, "7": false, "": false, "4096:1": false, "1:1048576": false} {
		d, ok := parseNumber(text)
		check.That(t, ok == valid && (!valid || d == block(7, 3)), "%q: %v, %v", text, d, ok)
	}
}

// TestQuestionAboutADevice: how often this table has a device open decides what is another's descriptor.
func TestQuestionAboutADevice(t *testing.T) {
	d := volume.Device{Kind: volume.BlockDevice, Major: 240, Minor: 77}
	id := identityOf(d)
	for _, c := range []struct {
		kept, held, mountable bool
		own, count            int
	}{{own: 1}, {held: true, own: 1, count: 1}, {held: true, mountable: true, own: 1}, {kept: true, own: 1, count: 1}, {kept: true, held: true, mountable: true, own: 2, count: 1}} {
		var kept map[string]*os.File
		if c.kept {
			kept = map[string]*os.File{claimName(id): check.Value(os.Open(os.DevNull))(t)}
		}
		table := newTable(t, nil, kept, &fakeOpeners{})
		if c.held {
			check.Must(t, heldAs(t, table, d))
			table.open.held[id].mountable = c.mountable
		}
		q, err := table.open.question(d) // one that is not open here cannot be opened: there is no such device
		sys.CloseFD(q.FD)
		claimed, open := c.kept || c.held && !c.mountable, c.kept || c.held
		check.That(t, (err == nil) == open && q.Own == c.own && q.Claimed == claimed && (q.FD >= 0) == open, "%+v: %+v, %v", c, q, err)
		check.Equal(t, table.Kept(), c.count, "%+v: kept claims", c)
	}
}

// brokenKeeper is a systemd that does not answer in time, and has done all the same what it was asked to store.
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

// TestClaimThatIsNotKept: a claim that the keeper did not take is none, because a restart would lose it.
func TestClaimThatIsNotKept(t *testing.T) {
	v, dev := imageOf(t)
	keeper := &brokenKeeper{keptNames: keptNames{}, broken: true}
	c := newTable(t, keeper, nil, &fakeOpeners{})
	fd := check.Value(unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0))(t)
	id := block(240, 77)
	p := &Pending{table: c, request: Request{Volume: v}, dev: dev, id: id, held: &heldDevice{fd: fd, device: deviceAs(id)}, unlock: func() {}}
	check.Fails(t, check.Err(p.Keep())) // or it was claimed
	keeper.broken = false
	check.Must(t, c.open.release(id))
	check.That(t, c.open.get(id) == nil && len(keeper.keptNames) == 0, "left are %v and %v", c.open.get(id), keeper.keptNames)
}

// heldAs has a device held that is none: no test without root has a device.
func heldAs(t *testing.T, c *Table, d volume.Device) error {
	t.Helper()
	fd := check.Value(unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0))(t)
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
				c := newTable(t, keeper, nil, &fakeOpeners{})
				err := heldAs(t, c, v.Device)
				check.Require(t, (err != nil) == keeper.broken, "%v", err)
				keeper.broken = true
				check.Kind(t, c.Release(Request{Volume: v}, nil), volume.Busy) // a release that failed
				keeper.broken = false
				err = last(c)
				check.That(t, err == nil && len(keeper.keptNames) == 0 && c.Kept() == 0, "%v, and kept are %v (%d)", err, keeper.keptNames, c.Kept())
			})
		}
	}
}

// fakeOpeners answers who has devices open, by their descriptors' names.
type fakeOpeners struct {
	who    string
	kernel bool
	err    error
	asked  int
	under  []openers.File // of a loop device; nil asks the kernel
	query  openers.Query  // the latest
	slow   bool           // loop devices hang
}

func (f *fakeOpeners) Await(_ context.Context, q openers.Query, _ time.Duration) (openers.Users, error) {
	f.asked, f.query = f.asked+1, q
	return openers.Users{Names: f.who, Kernel: f.kernel}, f.err
}

func (f *fakeOpeners) Holders(context.Context, openers.Query) ([]openers.Holder, error) {
	return nil, nil
}
func (f *fakeOpeners) OpenProcess(openers.Holder) (*openers.Process, error)          { return nil, nil }
func (f *fakeOpeners) Mark(int) openers.Mark                                         { return openers.Mark{} }
func (f *fakeOpeners) AwaitClosed(context.Context, openers.Mark, time.Duration) bool { return true }

func (f *fakeOpeners) Layers(file openers.File, fd int) ([]openers.File, error) {
	if f.slow && openers.IsLoop(file) {
		time.Sleep(time.Second)
		return nil, sys.ErrHangs
	}
	if f.under != nil {
		return slices.Concat([]openers.File{file}, f.under), nil
	}
	return openers.NewScanner(nil).Layers(file, fd)
}

func newTable(t *testing.T, keeper Keeper, kept map[string]*os.File, finder *fakeOpeners) *Table {
	users := NewUsers(finder, func() []string { return nil }, func(volume.Key) {})
	c := NewTable(keeper, kept, users)
	t.Cleanup(c.Close)
	return c
}

func imageOf(t *testing.T) (*volume.Volume, *OpenedDevice) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, nil, 0o600))
	fd := check.Value(unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0))(t)
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", Device: Identify(path)}
	dev := &OpenedDevice{Device: v.Device, FD: fd}
	t.Cleanup(dev.Close)
	return v, dev
}

// TestLeftoverOfAReleaseIsNoOwner: a device is proven to be free for its first owner, also if an
// earlier release could not be completed.
func TestLeftoverOfAReleaseIsNoOwner(t *testing.T) {
	v, dev := imageOf(t)
	finder := &fakeOpeners{}
	c := newTable(t, nil, nil, finder)
	check.Must(t, heldAs(t, c, v.Device))
	pending, err := c.Begin(t.Context(), Request{Volume: v}, dev)
	check.Require(t, err == nil && pending.First && finder.asked == 1, "%v, asked %d times", err, finder.asked)
	check.Value(pending.Keep())(t)
}

// TestWhatIsNotFreeIsNotClaimed: neither if somebody has the device, nor if it is not known, and a
// device that is looked at in between is proven again.
func TestWhatIsNotFreeIsNotClaimed(t *testing.T) {
	v, dev := imageOf(t)
	for name, finder := range map[string]*fakeOpeners{"open": {who: "process 1"}, "unknown": {err: errors.New("no answer")}} {
		c := newTable(t, nil, nil, finder)
		_, err := c.Begin(t.Context(), Request{Volume: v}, dev)
		check.That(t, volume.KindOf(err) == volume.Busy && len(c.owners.owned(v.Key)) == 0, "%s: %v", name, err)
		check.That(t, c.users.Get(v.Key) != nil, "%s: it is not listed as held", name)
		err = c.RefuseUsed(t.Context(), Request{Volume: v}, ReleaseTime)
		check.That(t, volume.KindOf(err) == volume.Busy, "%s: released: %v", name, err)
		*finder = fakeOpeners{}
		pending := check.Value(c.Begin(t.Context(), Request{Volume: v}, dev))(t)
		pending.Suspend()
		finder.who = "process 2"
		err = pending.Abandon(pending.Claim(t.Context()))
		check.That(t, volume.KindOf(err) == volume.Busy && len(c.owners.owned(v.Key)) == 0, "%s: taken meanwhile: %v", name, err)
	}
}

// TestHeldDeviceIsForgotten when nobody wants it any more, or its number belongs to another device. One that its
// volume owns stays, whoever wants it.
func TestHeldDeviceIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, dev := imageOf(t)
		finder := &fakeOpeners{who: "process 1"}
		c := newTable(t, nil, nil, finder)
		listed := func(wanted bool) bool {
			if wanted {
				check.Fails(t, check.Err(c.Begin(t.Context(), Request{Volume: v}, dev)))
			}
			time.Sleep(heldKept - time.Second)
			c.Refresh(t.Context(), func(*volume.Volume) bool { return true })
			return c.users.Get(v.Key) != nil
		}
		check.Equal(t, [3]bool{listed(true), listed(true), listed(false)}, [3]bool{true, true, false}, "listed while it is wanted")
		check.Fails(t, check.Err(c.Begin(t.Context(), Request{Volume: v}, dev)))
		refused := c.users.Get(v.Key).wanted
		c.users.remember(Request{Volume: v, wanted: refused.Add(-heldKept)}, "process 1") // a look that began before the call
		check.Equal(t, c.users.Get(v.Key).wanted, refused, "wanted")
		finder.who = ""
		check.Value(check.Value(c.Begin(t.Context(), Request{Volume: v}, dev))(t).Keep())(t)
		finder.who = "process 2"
		check.Kind(t, c.RefuseUsed(t.Context(), Request{Volume: v}, 0), volume.Busy)
		check.Equal(t, [2]bool{listed(false), listed(false)}, [2]bool{true, true}, "its release can name who has it")
	})
	c, d := newTable(t, nil, nil, &fakeOpeners{who: "process 3"}), numberedDevice(t)
	for _, sequence := range []string{"", "0"} { // the device itself, and one that had its number
		v := &volume.Volume{Key: volume.KeyOf("/" + sequence), Device: d}
		c.users.remember(Request{Volume: v, Sequence: sequence}, "process 4")
		c.Refresh(t.Context(), func(*volume.Volume) bool { return true })
		held := c.users.Get(v.Key)
		check.That(t, (held != nil) == (sequence == "") && (held == nil || held.Sequence == SequenceOf(d)), "of %q: %+v", sequence, held)
	}
}

// TestWhatCannotBeOpenedMayBeInUse: a name that leads nowhere proves nothing of an image whose filesystem is not where
// it was. One that was removed is nobody's, as is a device that the kernel has not any more.
func TestWhatCannotBeOpenedMayBeInUse(t *testing.T) {
	gone := volume.Device{Kind: volume.BlockDevice, Major: 4095, Minor: 1, Path: t.TempDir() + "/gone"}
	v, _ := imageOf(t)
	removed, elsewhere, lost := v.Device, v.Device, v.Device
	check.Must(t, os.Remove(removed.Path))
	elsewhere.Path = "/proc/1/there-is-no-such-image"
	lost.Path = "/there-is-no-such-directory/image"
	v, _ = imageOf(t)
	replaced, hidden := v.Device, v.Device
	hidden.Minor++ // another filesystem is mounted over that of the image
	check.Must(t, os.WriteFile(v.Device.Path+".new", nil, 0o600))
	check.Must(t, os.Rename(v.Device.Path+".new", v.Device.Path))
	for device, busy := range map[volume.Device]bool{gone: false, removed: false, replaced: false, elsewhere: true, lost: true, hidden: true} {
		c := newTable(t, nil, nil, &fakeOpeners{})
		r := Request{Volume: &volume.Volume{Key: "k", Target: "/t", Device: device}}
		err := c.RefuseUsed(t.Context(), r, ReleaseTime)
		check.That(t, (err != nil) == busy && (!busy || volume.KindOf(err) == volume.Busy), "%v at %s is free: %v", device, device.Path, err)
	}
}

// TestDevicesThatAreGone by what an open of them says. A disk that is offline says the same, and keeps its size.
func TestDevicesThatAreGone(t *testing.T) {
	numbers, err := os.ReadDir(blockDevices)
	check.Require(t, err == nil && len(numbers) != 0, "a machine without block devices: %v", err)
	tried := map[bool]bool{}
	for _, number := range numbers {
		there, _ := parseNumber(number.Name())
		_, sized := DeviceSize(deviceAs(there))
		tried[sized] = true
		for err, says := range map[error]bool{unix.ENXIO: true, unix.ENODEV: true, unix.ENOMEDIUM: true, unix.EIO: false, unix.ENOENT: false} {
			gone, found, want := isGone(deviceAs(there), err), volume.KindOf(holdError(&volume.Volume{Device: deviceAs(there)}, err)) == volume.NotFound, says && !sized
			_, still := DeviceSize(deviceAs(there))
			check.That(t, still != sized || gone == want && found == want, "%v of %s with a size %v: %v, %v", err, number.Name(), sized, gone, found)
		}
	}
	check.That(t, tried[true], "no device here has a size")
}

// TestSizeOfWhatHangs: a server that has gone does not keep who asks for the size of an image on it.
// What Identify would not look at has no size.
func TestSizeOfWhatHangs(t *testing.T) {
	check.NeedsRoot(t)
	dir := t.TempDir()
	check.Must(t, fuse.Prepare(dir))
	server := check.Value(fuse.Mount(dir, nil))(t)
	t.Cleanup(func() { check.Must(t, server.End()) })
	var st unix.Stat_t
	check.Must(t, unix.Lstat(server.File, &st))
	image := deviceAs(openers.FileOf(&st))
	image.Path = server.File
	check.Eventually(t, "its size", func() bool { size, known := DeviceSize(image); return known && size == fuse.Size })
	_, known := DeviceSize(volume.Device{Path: dir})
	check.That(t, !known, "a directory has a size")
	server.Silent.Store(true)
	for _, d := range []volume.Device{{Path: server.File}, image} {
		done := make(chan bool, 1)
		go func() { _, known := DeviceSize(d); done <- known }()
		select {
		case known := <-done:
			check.That(t, !known, "%v: it has a size", d)
		case <-time.After(time.Minute):
			t.Errorf("%v: it waits for the server", d)
		}
	}
}

// TestServersOfADevice: what a server has open besides the device that it serves holds the data of one.
func TestServersOfADevice(t *testing.T) {
	all := []string{"multipathd", "qemu-nbd"}
	u := NewUsers(&fakeOpeners{}, func() []string { return all }, func(volume.Key) {})
	for id, want := range map[identity][]string{block(43, 1): all, block(8, 1): all[:1], block(7, 1): nil, {Major: 8, Inode: 5}: nil} {
		got := u.serversOf(id)
		check.That(t, slices.Equal(got, want), "of %v: %q, want %q", id, got, want)
	}
	check.That(t, all[1] == "qemu-nbd", "the configuration was changed: %q", all)
}

// TestKeptClaimOfALostVolume: nobody knows any more which volume had the device, and a sandbox may still write to it.
func TestKeptClaimOfALostVolume(t *testing.T) {
	file := check.Value(os.Open(os.DevNull))(t)
	finder := &fakeOpeners{who: "process 7"}
	device := deviceAs(block(240, 77))
	c := newTable(t, nil, map[string]*os.File{claimName(identityOf(device)): file}, finder)
	lost := &volume.Volume{Key: "k", Target: "/t"}
	for range 2 {
		check.Must(t, c.RefuseKept(t.Context(), lost, []volume.Device{device})) // it is another volume's
		c.DropKept(t.Context(), nil)
		check.That(t, c.Kept() == 1, "the claim on a device that somebody has open was given up")
		check.Kind(t, c.RefuseKept(t.Context(), lost, nil), volume.Busy) // or a volume whose device may be that one is free
		*finder = fakeOpeners{err: errors.New("no answer")}
	}
	*finder = fakeOpeners{}
	check.Must(t, c.RefuseKept(t.Context(), lost, nil))
	c.DropKept(t.Context(), nil)
	check.That(t, c.Kept() == 0, "a claim is kept on a device that nobody has open")
}

// TestOwnersShareOnlyToRead: one writer, or several readers; and a writer is refused beside a reader
// as a reader is beside a writer.
func TestOwnersShareOnlyToRead(t *testing.T) {
	id := block(240, 1)
	for _, test := range []struct{ first, second, allowed bool }{
		{true, true, true}, {true, false, false}, {false, true, false}, {false, false, false},
	} {
		o := newOwners(nil)
		device := deviceAs(id)
		check.Must(t, o.reserve(&volume.Volume{Key: "a", Target: "/a", ReadOnly: test.first, Device: device}, id))
		second := &volume.Volume{Key: "b", Target: "/b", ReadOnly: test.second, Device: device}
		for _, err := range []error{o.refuseStacked(second, []identity{id}), o.reserve(second, id)} {
			check.That(t, (err == nil) == test.allowed && (err == nil || volume.KindOf(err) == volume.InUse),
				"read-only %v beside read-only %v: %v", test.second, test.first, err)
		}
	}
}

// TestBeside: read-only volumes may have several loop devices over one image, each of which opens it.
func TestBeside(t *testing.T) {
	o := newOwners(nil)
	image := identity{Major: 8, Inode: 5}
	own := func(key volume.Key, ids ...identity) {
		v := &volume.Volume{Key: key, ReadOnly: true, Device: deviceAs(ids[0])}
		for _, id := range ids {
			check.Must(t, o.reserve(v, id))
		}
	}
	own("a", block(7, 1), image)
	own("b", block(7, 1), image) // the same device
	own("c", block(7, 2), image)
	own("d", block(7, 3), block(7, 4), image)
	own("e", block(7, 5), identity{Major: 8, Inode: 6})
	own("f", block(259, 1), image) // a partition of a loop device does not open it
	got := o.beside("a")
	check.That(t, slices.Equal(got, []identity{block(7, 2), block(7, 4)}), "beside a: %v", got)
	for _, key := range []volume.Key{"e", "f"} {
		got = o.beside(key)
		check.That(t, len(got) == 0, "beside %s: %v", key, got)
	}
}
