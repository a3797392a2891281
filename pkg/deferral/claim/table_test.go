package claim

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// reader is a read-only volume of a block device that no machine has.
func reader(target string) *volume.Volume {
	return &volume.Volume{Key: volume.KeyOf(target), Target: target, ReadOnly: true, Device: volume.Device{
		Kind: volume.BlockDevice, Major: 240, Minor: 77, Path: os.DevNull,
	}}
}

// TestReadOnlyFlagThatCannotBeSet: a device that stays writable is not handed to a reader. No flag can be
// set by the descriptor of heldAs.
func TestReadOnlyFlagThatCannotBeSet(t *testing.T) {
	writer, image := reader("/a"), reader("/a")
	writer.ReadOnly, image.Device.Kind = false, volume.ImageFile
	for name, c := range map[string]struct {
		v         *volume.Volume
		held, set bool
	}{
		"held": {reader("/a"), true, false}, "not held": {reader("/a"), false, false}, "writer": {writer, true, true}, "image": {image, true, true},
	} {
		table := newTable(t, nil, nil, &fakeOpeners{})
		if c.held {
			check.Must(t, heldAs(t, table, c.v.Device))
		}
		err := table.SetReadOnly(c.v)
		check.That(t, (err == nil) == c.set, "%s: %v", name, err)
	}
}

// TestClaimStays when its release fails, and while another reader has the device.
func TestClaimStays(t *testing.T) {
	v, other := reader("/a"), reader("/b")
	id := identityOf(v.Device)
	errLeave := errors.New("somebody has it")
	for name, c := range map[string]struct {
		wasReadOnly, shared bool
		leave               error
		ended, open         bool // whether the volume's claim ended, and the device is still held
	}{
		"the flag cannot be restored": {open: true},
		"the flag was there before":   {wasReadOnly: true, ended: true},
		"another reader":              {shared: true, ended: true, open: true},
		"leave fails":                 {wasReadOnly: true, leave: errLeave, open: true},
		"leave fails for one of two":  {shared: true, leave: errLeave, open: true},
	} {
		table := newTable(t, nil, nil, &fakeOpeners{})
		check.Must(t, heldAs(t, table, v.Device))
		check.Must(t, table.owners.reserve(v, id))
		if c.shared {
			check.Must(t, table.owners.reserve(other, id))
		}
		r := Request{Volume: v, WasReadOnly: c.wasReadOnly}
		err := table.Release(r, func(last bool) error {
			check.That(t, last != c.shared && table.Has(r), "%s: last %v, and its claim is there: %v", name, last, table.Has(r))
			return c.leave
		})
		check.That(t, (err == nil) == c.ended && len(table.owners.owned(v.Key)) == 0 == c.ended && (table.open.get(id) != nil) == c.open,
			"%s: %v, the volume owns %v", name, err, table.owners.owned(v.Key))
	}
}

// TestOneKindOfHandler: readers share a device only if all of their handlers, or none, have this node's
// kernel mount it.
func TestOneKindOfHandler(t *testing.T) {
	for _, mountable := range []bool{false, true} {
		v, other := reader("/a"), reader("/b")
		table := newTable(t, nil, nil, &fakeOpeners{})
		check.Must(t, heldAs(t, table, v.Device))
		check.Must(t, table.owners.reserve(v, identityOf(v.Device)))
		pending := check.Value(table.Begin(t.Context(), Request{Volume: other, Mountable: mountable}, &OpenedDevice{Device: other.Device, FD: sys.NoFD}))(t)
		check.That(t, !pending.First, "the second reader is the first owner")
		_, err := pending.Keep()
		check.That(t, (err != nil) == mountable && (err == nil || volume.KindOf(err) == volume.InUse) && (len(table.owners.owned(other.Key)) > 0) != mountable,
			"mountable %v beside a claim: %v", mountable, err)
	}
}

// TestAbandonedClaimOnRecord stays the volume's, whose sandbox may have the device, unless that has gone.
func TestAbandonedClaimOnRecord(t *testing.T) {
	for kind, stays := range map[volume.Kind]bool{volume.Internal: true, volume.NotFound: false} {
		v, dev := imageOf(t)
		dev.known = true
		table := newTable(t, nil, nil, &fakeOpeners{})
		pending := check.Value(table.Begin(t.Context(), Request{Volume: v}, dev))(t)
		err := pending.Abandon(volume.Errorf(kind, "no"))
		check.That(t, volume.KindOf(err) == kind && len(table.owners.owned(v.Key)) > 0 == stays, "%v: %v, the volume owns %v", kind, err, table.owners.owned(v.Key))
	}
}

// TestKeptClaimOfAnotherDevice: the number may belong to another device by now.
func TestKeptClaimOfAnotherDevice(t *testing.T) {
	v := reader("/a")
	for name, want := range map[string]volume.Kind{claimName(identityOf(v.Device)): volume.Internal, "OTHER": volume.NotFound} {
		for _, mountable := range []bool{false, true} {
			if mountable { // it is not claimed by a descriptor
				want = volume.NotFound
			}
			file := check.Value(os.Open(os.DevNull))(t)
			r, table := Request{Volume: v, Mountable: mountable}, newTable(t, nil, map[string]*os.File{name: file}, &fakeOpeners{})
			err := table.Reclaim(t.Context(), r)
			check.That(t, err != nil && volume.KindOf(err) == want && !table.Has(r) && table.Kept() == 1,
				"%s, mountable %v: claimed by the descriptor of another device: %v", name, mountable, err)
		}
	}
}

// TestAnotherImageByTheName is not claimed for the volume on record.
func TestAnotherImageByTheName(t *testing.T) {
	v, _ := imageOf(t)
	table := newTable(t, nil, nil, &fakeOpeners{})
	check.Must(t, table.Reclaim(t.Context(), Request{Volume: v}))
	check.That(t, table.Has(Request{Volume: v}), "an image that is there is not claimed")
	check.Must(t, table.Release(Request{Volume: v}, nil))
	file, err := OpenDevice(v.Device)
	check.That(t, err == nil && file.Close() == nil, "its image: %v", err)
	check.Must(t, os.WriteFile(v.Device.Path+".new", nil, 0o600))
	check.Must(t, os.Rename(v.Device.Path+".new", v.Device.Path))
	check.Fails(t, check.Err(OpenDevice(v.Device))) // or another image is opened by the name
	err = table.Reclaim(t.Context(), Request{Volume: v})
	check.That(t, volume.KindOf(err) == volume.NotFound && err != nil && !table.Has(Request{Volume: v}), "claimed by its name: %v", err)
}

// TestDeviceThatTheKernelHas is in use: nobody is told to end a VM for it.
func TestDeviceThatTheKernelHas(t *testing.T) {
	v, dev := imageOf(t)
	table := newTable(t, nil, nil, &fakeOpeners{who: "mount", kernel: true})
	_, err := table.Begin(t.Context(), Request{Volume: v}, dev)
	check.That(t, volume.KindOf(err) == volume.InUse && table.users.Get(v.Key) == nil, "%v, listed as %v", err, table.users.Get(v.Key))
}

// TestWaitForAFreeDevice ends with the patience, with the caller, and with any other answer.
func TestWaitForAFreeDevice(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, c := range map[string]struct {
		ctx      context.Context
		patience time.Duration
		answers  []error // of which the last one is repeated
		want     error
	}{
		"no patience":  {t.Context(), -1, []error{unix.EBUSY}, unix.EBUSY},
		"no caller":    {ended, time.Hour, []error{unix.EBUSY}, unix.EBUSY},
		"free by then": {t.Context(), time.Hour, []error{unix.EBUSY, unix.EBUSY, nil}, nil},
		"has gone":     {t.Context(), time.Hour, []error{unix.EBUSY, unix.ENXIO}, unix.ENXIO},
	} {
		_, err := openFree(c.ctx, c.patience, func() (int, error) {
			err := c.answers[0]
			c.answers = c.answers[min(1, len(c.answers)-1):]
			return sys.NoFD, err
		})
		check.That(t, errors.Is(err, c.want), "%s: %v", name, err)
	}
}

// TestTwoLoopDevicesOfOneImage are one disk, and so is a loop device with the image itself.
func TestTwoLoopDevicesOfOneImage(t *testing.T) {
	image := openers.File{Major: 8, Inode: 5}
	for _, readOnly := range []bool{false, true} {
		o := newOwners(&fakeOpeners{under: []openers.File{image}})
		for n, allowed := range []bool{true, readOnly} {
			id := block(7, uint32(n))
			v := &volume.Volume{Key: volume.Key(rune('a' + n)), Target: "/t", ReadOnly: readOnly, Device: deviceAs(id)}
			_, err := o.reserveBacking(v, sys.NoFD, id)
			check.That(t, (err == nil) == allowed && (err == nil || volume.KindOf(err) == volume.InUse),
				"read-only %v, loop device %d: %v", readOnly, n, err)
		}
		writer := &volume.Volume{Key: "w", Target: "/w", Device: deviceAs(image)}
		check.Kind(t, o.reserve(writer, image), volume.InUse) // the image itself
	}
}

// TestDeviceOfAnotherProgram is shared to read only, too, whatever it is called.
func TestDeviceOfAnotherProgram(t *testing.T) {
	v, _ := imageOf(t)
	table := newTable(t, nil, nil, &fakeOpeners{})
	for _, c := range []struct{ own, theirs, allowed bool }{{true, true, true}, {true, false, false}, {false, true, false}, {false, false, false}} {
		v.ReadOnly = c.own
		err := table.users.RefuseAdopted(t.Context(), v, []*volume.Volume{{Target: "/other", ReadOnly: c.theirs, Device: v.Device}})
		check.That(t, (err == nil) == c.allowed && (err == nil || volume.KindOf(err) == volume.InUse),
			"read-only %v beside read-only %v: %v", c.own, c.theirs, err)
	}
	v.ReadOnly = false
	check.Must(t, os.Link(v.Device.Path, v.Device.Path+".link"))
	other, _ := imageOf(t)
	for path, allowed := range map[string]bool{v.Device.Path + ".link": false, other.Device.Path: true, v.Device.Path + ".none": true} {
		err := table.users.RefuseAdopted(t.Context(), v, []*volume.Volume{{Target: "/other", Device: volume.Device{Path: path}}})
		check.That(t, (err == nil) == allowed, "beside %s: %v", path, err)
	}
}

// TestLoopDeviceThatCannotBeRead is a process without free descriptors: what a loop device
// has under it is not known then.
func TestLoopDeviceThatCannotBeRead(t *testing.T) {
	loop := volume.Device{Kind: volume.BlockDevice, Major: 7, Minor: 0, Path: "/dev/loop0"}
	v := &volume.Volume{Key: "k", Target: "/t", Device: loop}
	adopted := []*volume.Volume{{Target: "/other", Device: volume.Device{Path: "/dev/null"}}}
	c := newTable(t, nil, nil, &fakeOpeners{})
	image, _ := imageOf(t)
	check.WithoutDescriptors(t, func() {
		check.Kind(t, c.RefuseUsed(t.Context(), Request{Volume: image}, ReleaseTime), volume.Busy) // or an image that cannot be opened is free
		check.Is(t, c.users.RefuseAdopted(t.Context(), v, adopted), unix.EMFILE)                   // beside a volume of another program
		check.Kind(t, c.RefuseUsed(t.Context(), Request{Volume: v}, ReleaseTime), volume.Busy)     // or a device that cannot be opened is free
	})
}

// TestReadOnlyFlagThatCannotBeRestored: the release is repeated, or the device would stay
// read-only for its next volume.
func TestReadOnlyFlagThatCannotBeRestored(t *testing.T) {
	c := newTable(t, nil, nil, &fakeOpeners{})
	device := volume.Device{Kind: volume.BlockDevice, Major: 240, Minor: 77, Path: "/dev/null"}
	r := Request{Volume: &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", ReadOnly: true, Device: device}}
	check.WithoutDescriptors(t, func() {
		check.Is(t, c.Release(r, nil), unix.EMFILE) // released
	})
	for _, path := range []string{"/dev/null", "/dev/there-is-no-such-device"} {
		r.Device.Path = path
		check.Must(t, c.Release(r, nil)) // that device has gone
	}
}

// TestDeviceThatCannotBeOpenedStaysOwned is a restart without free descriptors: a sandbox of
// the volume may still have its device.
func TestDeviceThatCannotBeOpenedStaysOwned(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(path, []byte("x"), 0o600))
	v := &volume.Volume{Key: volume.KeyOf("/a"), Target: "/a", Device: Identify(path)}
	other := &volume.Volume{Key: volume.KeyOf("/b"), Target: "/b", Device: v.Device}
	c := newTable(t, nil, nil, &fakeOpeners{})
	check.WithoutDescriptors(t, func() {
		check.Is(t, c.Reclaim(t.Context(), Request{Volume: v}), unix.EMFILE) // claimed again
	})
	dev := &OpenedDevice{Device: other.Device, FD: sys.NoFD}
	check.Kind(t, check.Err(c.Begin(t.Context(), Request{Volume: other}, dev)), volume.InUse) // or another volume claimed the device
	check.Must(t, os.Remove(path))
	check.Must(t, c.Release(Request{Volume: v}, nil))
	err := c.Reclaim(t.Context(), Request{Volume: v})
	check.That(t, volume.KindOf(err) == volume.NotFound && len(c.owners.owned(v.Key)) == 0, "an image that has gone: %v", err)
}

// TestDevicesThatMayBeHandedOver lie below a directory for their kind, and links do not lead out of it.
func TestDevicesThatMayBeHandedOver(t *testing.T) {
	const fine = volume.Internal // no error
	images, devices, other := t.TempDir(), t.TempDir(), t.TempDir()
	for _, dir := range []string{images, devices, other} {
		check.Must(t, os.WriteFile(dir+"/a", nil, 0o600))
	}
	check.Must(t, errors.Join(os.Mkdir(images+"/dir", 0o700), os.Symlink("a", images+"/link"), os.Symlink(other+"/a", images+"/out"),
		os.Symlink(os.DevNull, images+"/null"), unix.Mkfifo(devices+"/fifo", 0o600)))
	policy := DevicePolicy{Images: []string{images}, Roots: []string{devices, "/dev"}}
	for backing, want := range map[string]volume.Kind{
		images + "/a": fine, images + "/link": fine, images + "/out": volume.Denied, images + "/none": volume.NotFound,
		images + "/a/b": volume.NotFound, images + "/x/../../a": volume.Denied, other + "/a": volume.Denied,
		devices + "/a": volume.Denied, images + "/dir": volume.Invalid, devices + "/fifo": volume.Invalid,
		images + "/null": volume.Denied, images: volume.Denied, os.DevNull: volume.Invalid,
	} {
		dev, err := policy.Open("/t", backing)
		if want == fine {
			check.Must(t, err)
			dev.Close()
			check.That(t, dev.Same(Identify(images+"/a")) && dev.Path == images+"/a", "%s is %v at %s", backing, dev.Device, dev.Path)
		} else if err == nil || volume.KindOf(err) != want {
			t.Errorf("%s: %v", backing, err)
		}
	}
}

// TestAdoptedImageThatCannotBeIdentified is the one that it was, and stops no other volume.
func TestAdoptedImageThatCannotBeIdentified(t *testing.T) {
	v, _ := imageOf(t)
	other, _ := imageOf(t)
	name := filepath.Join(t.TempDir(), "name") // another one of the image
	check.Must(t, os.Link(v.Device.Path, name))
	adopted := []*volume.Volume{{Target: "/other", Device: Identify(name)}}
	for range 64 {
		hung := check.Value(paths.Begin(t.TempDir()))(t)
		hung.Leave()
		t.Cleanup(func() { hung.End() })
	}
	table := newTable(t, nil, nil, &fakeOpeners{})
	check.Must(t, table.users.RefuseAdopted(t.Context(), other, adopted))
	check.Kind(t, table.users.RefuseAdopted(t.Context(), v, adopted), volume.InUse) // or it is given to a second volume
	synctest.Test(t, func(t *testing.T) {
		for n := range uint32(64) {
			adopted = append(adopted, &volume.Volume{Device: deviceAs(block(7, n))})
		}
		table.users.openers = &fakeOpeners{slow: true}
		began := time.Now()
		check.Must(t, table.users.RefuseAdopted(t.Context(), other, adopted))
		check.That(t, time.Since(began) < 10*time.Second, "others that hang delay a volume by %v", time.Since(began))
		check.Kind(t, table.users.RefuseAdopted(check.Within(t, 0), other, adopted), volume.Timeout)
	})
}
