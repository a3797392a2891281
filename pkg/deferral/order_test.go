package deferral

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestOrderOfSteps is what makes a kill at any point harmless.
func TestOrderOfSteps(t *testing.T) {
	for name, c := range map[string]struct {
		handler func(*bench) Projector
		release []string
	}{
		"a handler": {plain, []string{
			"in-use claimed volumes", "free claimed volumes", "retract claimed removing", "unguard claimed removing",
			"free claimed removing", "leaving claimed removing",
		}},
		"one that tracks sandboxes": {tracking, []string{
			"in-use claimed volumes", "free claimed volumes", "withdraw claimed removing", "unguard claimed removing",
			"free claimed removing", "leaving claimed removing", "retract removing",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newBench(t, c.handler)
			check.Value(s.b.Defer(t.Context(), s.asked()))(t)
			s.saw("check", "free claimed", "guard claimed volumes", "publish claimed volumes")
			s.is("claimed volumes")
			check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
			s.saw(c.release...)
			s.is("")
		})
	}
}

// TestFailedStepOfDefer: whatever fails, nothing is left, and the error keeps its kind. If that cannot be
// undone, the error is one to retry and the claim stays, until a repeated call has ended the removal.
func TestFailedStepOfDefer(t *testing.T) {
	undone := []string{"retract claimed", "unguard claimed", "free claimed", "leaving claimed"}
	removed := []string{"retract claimed removing", "unguard claimed removing", "free claimed removing", "leaving claimed removing"}
	fails := volume.Errorf(volume.Unsupported, "%w", errStep)
	for _, c := range []struct {
		fails, in string
		kind      volume.Kind
		steps     []string
	}{
		{"filesystem", "", volume.Invalid, nil},
		{"handler", "", volume.Invalid, nil},
		{"device", "", volume.Denied, nil},
		{"check", "", volume.Unsupported, []string{"check"}},
		{"options", "", volume.Unsupported, []string{"check"}},
		{"free", "", volume.Busy, []string{"check", "free claimed"}},
		{"record", "", volume.Internal, slices.Concat([]string{"check", "free claimed"}, undone)},
		{"guard", "", volume.Unsupported, slices.Concat([]string{"check", "free claimed", "guard claimed volumes"}, removed)},
		{"publish", "", volume.Unsupported, slices.Concat([]string{"check", "free claimed", "guard claimed volumes", "publish claimed volumes"}, removed)},
		{"publish", "retract", volume.Busy, []string{"check", "free claimed", "guard claimed volumes", "publish claimed volumes", "retract claimed removing"}},
		{"publish", "unguard", volume.Busy, slices.Concat([]string{"check", "free claimed", "guard claimed volumes", "publish claimed volumes"}, removed[:2])},
		{"publish", "free claimed removing", volume.Busy, slices.Concat([]string{"check", "free claimed", "guard claimed volumes", "publish claimed volumes"}, removed[:3])},
	} {
		t.Run(c.fails+" "+c.in, func(t *testing.T) {
			s := newBench(t, plain)
			in := s.asked()
			s.fail[c.fails], s.fail[c.in] = fails, errStep
			switch c.fails {
			case "filesystem":
				in.FSType = "../ext4"
			case "handler":
				in.Handler = "none"
			case "device":
				in.Backing = os.DevNull
			case "options":
				in.MountFlags = []string{"rbind"}
			case "record":
				check.Must(t, os.Remove(filepath.Join(s.b.cfg.StateDir, volumesDir)))
			}
			_, err := s.b.Defer(t.Context(), in)
			s.wants(err, c.kind)
			s.saw(c.steps...)
			if c.in == "" {
				s.is("")
				return
			}
			s.wants(err, volume.Busy, "could not be undone yet")
			s.is("claimed removing")
			s.wants(check.Err(s.b.Defer(t.Context(), in)), volume.Busy, "its removal was begun")
			s.is("claimed removing")
			clear(s.fail)
			check.Value(s.b.Defer(t.Context(), in))(t)
			s.is("claimed volumes")
		})
	}
}

// TestReadOnlyDeviceThatCannotBeSet: a sandbox could write to it, so the volume is not published.
func TestReadOnlyDeviceThatCannotBeSet(t *testing.T) {
	s := newBench(t, plain)
	in := s.asked()
	target := check.Value(s.b.targets.root.Resolve(in.Target))(t)
	defer target.Close()
	device := volume.Device{Kind: volume.BlockDevice, Path: "/dev/null", Major: 240, Minor: 77} // nothing holds it
	a := &attempt{b: s.b, in: &in, handler: projector{s, "kata"}, target: target, dev: &claim.OpenedDevice{Device: device}}
	rec := a.record(sys.NoFD)
	rec.ReadOnly = true
	s.wants(a.publish(t.Context(), rec, 0), volume.Internal, "is not held")
	s.saw()
}

// TestRepeatedDefer restores what is missing of the same volume, refuses another one, and promises with no
// final error that nothing is left.
func TestRepeatedDefer(t *testing.T) {
	s := publishedBench(t, plain)
	for name, change := range map[string]func(*volume.Instruction){
		"filesystem": func(in *volume.Instruction) { in.FSType = "xfs" },
		"flags":      func(in *volume.Instruction) { in.MountFlags = in.MountFlags[:1] },
		"read-only":  func(in *volume.Instruction) { in.MountFlags = append(in.MountFlags, "ro") },
		"group":      func(in *volume.Instruction) { in.Group = "1001" },
		"policy":     func(in *volume.Instruction) { in.GroupPolicy = volume.GroupOnMismatch },
		"handler":    func(in *volume.Instruction) { in.Handler = "other" },
		"device":     func(in *volume.Instruction) { in.Backing = filepath.Join(filepath.Dir(in.Backing), "other") },
	} {
		t.Logf("another %s", name)
		in := s.asked()
		change(&in)
		s.wants(check.Err(s.b.Defer(t.Context(), in)), volume.Conflict)
		s.saw()
	}
	for name, change := range map[string]func(*volume.Instruction){
		"invalid":      func(in *volume.Instruction) { in.FSType = "../ext4" },
		"no handler":   func(in *volume.Instruction) { in.Handler = "none" },
		"the link":     func(in *volume.Instruction) { in.Backing += "-has-gone" },
		"not accepted": func(*volume.Instruction) { s.b.SetDevices(claim.DevicePolicy{Roots: []string{"/dev"}}) },
	} {
		t.Log(name)
		in, accepted := s.asked(), s.b.devices.Load()
		change(&in)
		_, err := s.b.Defer(t.Context(), in)
		s.b.SetDevices(*accepted)
		s.wants(err, volume.Busy, "stays")
		in.Target = "/elsewhere"
		_, err = s.b.Defer(t.Context(), in)
		check.That(t, volume.KindOf(err) != volume.Busy, "what is not on record stays: %v", err)
		s.is("claimed volumes")
		s.saw()
	}
	restored := []string{"guard claimed volumes", "publish claimed volumes"}
	in := s.asked()
	in.MountFlags, s.b.handlers.byDefault = []string{"noatime,discard"}, "other" // which is the default by now
	for _, in.Handler = range []string{"kata", ""} {
		check.Value(s.b.Defer(t.Context(), in))(t)
		s.saw(restored...)
	}
	for i, step := range []string{"guard", "publish"} {
		s.fail = map[string]error{step: volume.Errorf(volume.Conflict, "%w", errStep)}
		s.wants(check.Err(s.b.Defer(t.Context(), in)), volume.Busy)
		s.saw(restored[:i+1]...)
		s.is("claimed volumes")
		check.That(t, s.b.table.get(s.key).problem != nil, "the volume is not shown with its problem")
	}
	check.That(t, s.counted == 1, "%d publishes were counted of one and its repeats", s.counted)
}

// TestTwoVolumesOfOneDevice: the second one is refused before anything of it exists, and gets the device
// when the first has gone.
func TestTwoVolumesOfOneDevice(t *testing.T) {
	s := publishedBench(t, plain)
	in := s.asked()
	in.Target = s.b.cfg.Root + "/second"
	s.wants(check.Err(s.b.Defer(t.Context(), in)), volume.InUse, s.asked().Target)
	s.saw("check claimed volumes")
	check.That(t, !s.b.table.has(volume.KeyOf(in.Target)), "the refused volume is in the table")
	check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
	check.Must(t, check.Err(s.b.Defer(t.Context(), in)))
}

// TestRefusedRelease: before the removal has begun nothing of the volume changes, and after that its claim
// stays until a repeated call ends the removal.
func TestRefusedRelease(t *testing.T) {
	forgotten := NewForgotten(&volume.Volume{Target: "/t"}, "abc")
	before, begun := []string{"in-use claimed volumes", "free claimed volumes"}, []string{"in-use claimed volumes", "free claimed volumes", "withdraw claimed removing"}
	for name, c := range map[string]struct {
		handler func(*bench) Projector
		fail    map[string]error
		who     string
		want    string // what exists in the end
		steps   []string
	}{
		"a sandbox has it":    {plain, nil, "abc", "claimed volumes", before[:1]},
		"it is not known":     {plain, map[string]error{"in-use": volume.Errorf(volume.Busy, "not ready")}, "", "claimed volumes", before[:1]},
		"a process has it":    {plain, map[string]error{"free": errOpen}, "", "claimed volumes", before},
		"nobody can tell":     {plain, map[string]error{"free": errStep}, "", "claimed volumes", before},
		"forgotten":           {plain, map[string]error{"in-use": forgotten}, "", "claimed volumes", before},
		"forgotten, and open": {tracking, map[string]error{"in-use": forgotten, "free": errOpen}, "", "claimed volumes", before},
		"withdraw fails": {
			tracking, map[string]error{"in-use": forgotten, "withdraw": errStep}, "", "claimed volumes",
			slices.Concat(before, []string{"withdraw claimed volumes", "publish claimed volumes"}),
		},
		"the runtime lists it": {
			tracking, map[string]error{"in-use": forgotten, "disowned": errStep}, "", "claimed volumes",
			slices.Concat(before, []string{"withdraw claimed volumes", "disowned claimed volumes", "publish claimed volumes"}),
		},
		"a process has it by now": {
			tracking, map[string]error{"free claimed removing": errOpen}, "", "claimed removing",
			slices.Concat(begun, []string{"unguard claimed removing", "free claimed removing"}),
		},
		"withdraw fails later": {tracking, map[string]error{"withdraw": errStep}, "", "claimed removing", begun},
		"unguard fails":        {tracking, map[string]error{"unguard": errStep}, "", "claimed removing", slices.Concat(begun, []string{"unguard claimed removing"})},
		"forget fails": {
			tracking, map[string]error{"retract": errStep}, "", "removing",
			slices.Concat(begun, []string{"unguard claimed removing", "free claimed removing", "leaving claimed removing", "retract removing"}),
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := publishedBench(t, c.handler)
			s.who = c.who
			if c.fail != nil {
				s.fail = c.fail
			}
			check.Fails(t, check.Err(s.b.Release(t.Context(), s.asked().Target))) // or it was released
			s.saw(c.steps...)
			s.is(c.want)
			known := s.b.table.get(s.key)
			check.That(t, (known.refusal != nil) != known.removing && (known.problem != nil) == known.removing,
				"it is shown with the refusal %v and the problem %v", known.refusal, known.problem)
			s.fail, s.who = nil, ""
			check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
			s.is("")
		})
	}
}

// TestGrowthIsOnRecordFirst: a sandbox that starts meanwhile grows the filesystem once, and the end of one
// growth ends no other.
func TestGrowthIsOnRecordFirst(t *testing.T) {
	s := publishedBench(t, plain)
	s.fail["publish"] = errStep
	check.Is(t, s.b.GrowAtMount(t.Context(), s.key, 2<<30), errStep)
	for _, c := range []struct{ ended, left int64 }{{1 << 30, 2 << 30}, {2 << 30, 0}} {
		check.Must(t, s.b.EndGrowth(s.key, c.ended))
		rec, err := readRecord(s.b.store.path(volumesDir, s.key))
		check.That(t, err == nil && rec.GrowTo == c.left, "after the end of a growth to %d: %d, %v", c.ended, rec.GrowTo, err)
	}
	s.said = nil
	tmp := filepath.Join(s.b.cfg.StateDir, tmpDir)
	check.Must(t, errors.Join(os.RemoveAll(tmp), os.WriteFile(tmp, nil, 0o600))) // no record can be written
	s.wants(s.b.GrowAtMount(t.Context(), s.key, 2<<30), volume.Internal, "cannot be written")
	s.saw()
	s.fail["unguard"] = errStep
	for _, left := range []string{"claimed removing", ""} {
		_, _ = s.b.Release(t.Context(), s.asked().Target)
		s.fail = nil
		check.Must(t, s.b.EndGrowth(s.key, 0)) // it writes no record of a volume that goes
		s.wants(s.b.GrowAtMount(t.Context(), s.key, 2<<30), volume.NotFound)
		s.is(left)
	}
}

// TestRemovalThatCannotBeRecorded does not begin: a restart would bring the volume back without its device. A directory
// that somebody removed is made again.
func TestRemovalThatCannotBeRecorded(t *testing.T) {
	s := publishedBench(t, plain)
	removing := filepath.Join(s.b.cfg.StateDir, removingDir)
	check.Must(t, errors.Join(os.Remove(removing), os.WriteFile(removing, nil, 0o600)))
	s.wants(check.Err(s.b.Release(t.Context(), s.asked().Target)), volume.Internal, "cannot be recorded")
	s.saw("in-use claimed volumes", "free claimed volumes")
	s.is("claimed volumes")
	check.Must(t, os.Remove(removing))
	check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
	s.saw("retract claimed removing", "unguard claimed removing", "free claimed removing", "leaving claimed removing")
	s.is("")
}

// TestWithoutRecord: a projection of nobody is retracted when no sandbox may have its volume, and the release
// of an unknown target fails while one cannot be retracted.
func TestWithoutRecord(t *testing.T) {
	s := newBench(t, plain)
	s.standing = &volume.Volume{Key: s.key, Target: s.asked().Target}
	s.who = "abc"
	check.Value(s.b.Reconcile(t.Context()))(t)
	s.saw("in-use")
	s.who = ""
	check.Value(s.b.Reconcile(t.Context()))(t)
	s.saw("in-use", "retract")
	s.fail["retract"] = errStep
	check.Is(t, check.Err(s.b.Release(t.Context(), s.asked().Target)), errStep)
	s.saw("retract")
	s.fail = nil
	check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
	s.saw("retract", "retract") // by each handler
}

// TestReleaseDoesNotRemoveWhatItDidNotAskAbout: a volume that was published while its release waited may have
// a sandbox by now.
func TestReleaseDoesNotRemoveWhatItDidNotAskAbout(t *testing.T) { synctest.Test(t, releaseThatWaited) }

func releaseThatWaited(t *testing.T) {
	s := newBench(t, plain)
	rec := testRecord(s.asked().Target)
	rec.Boot, rec.Device.Major = s.b.boot, 4095 // no such device
	unlock := check.Value(s.b.locks.lock(t.Context(), s.key))(t)
	ended := check.Begin(func() error { return check.Err(s.b.Release(t.Context(), rec.Target)) })
	synctest.Wait() // it waits for the lock
	check.Must(t, s.b.store.put(rec))
	s.b.table.add(rec)
	unlock()
	s.wants(<-ended, volume.Busy)
	s.saw()
	s.is("volumes")
	check.Value(s.b.Release(t.Context(), rec.Target))(t)
	s.is("")
}

// TestGuardThatCannotBeReached: its removal is tried again, unless it is below a former root.
func TestGuardThatCannotBeReached(t *testing.T) {
	s := publishedBench(t, plain)
	rec := *s.b.table.get(s.key).rec
	check.WithoutDescriptors(t, func() { check.That(t, s.b.remover.unguard(&rec, nil) != nil, "it counts as removed") })
	rec.ResolvedTarget = "/former-root/mount"
	check.Must(t, s.b.remover.unguard(&rec, nil))
	s.saw()
}

// TestRootThatLeadsElsewhere today, by a link that replaced it: what is on record is neither released nor restored there.
func TestRootThatLeadsElsewhere(t *testing.T) {
	s := publishedBench(t, plain)
	check.Must(t, errors.Join(os.Rename(s.b.cfg.Root, s.b.cfg.Root+"-was"), os.Symlink(t.TempDir(), s.b.cfg.Root)))
	_, released := s.b.ReleaseKey(t.Context(), s.key, false)
	_, restored := s.b.restorer.restoreRecord(t.Context(), s.b.table.get(s.key).rec)
	for _, err := range []error{released, restored} {
		s.wants(err, volume.Invalid, s.asked().Target, "leads to")
	}
	s.wants(check.Err(s.b.Release(t.Context(), s.asked().Target)), volume.Busy, "root directory")
	was := s.b.targets.root
	s.b.targets.root = guard.NewRoot(t.TempDir(), "") // of another configuration
	s.wants(check.Err(s.b.Release(t.Context(), s.asked().Target)), volume.Busy, "root directory")
	s.b.targets.root = was
	s.saw()
	s.is("claimed volumes")
	check.Value(s.b.ReleaseKey(t.Context(), s.key, true))(t)
	s.saw("retract claimed removing", "leaving claimed removing", "free")
	s.is("")
}
