package deferral

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestReadOnlyDeviceThatCannotBeSetAgain is the same for a volume whose claim was kept over a restart.
func TestReadOnlyDeviceThatCannotBeSetAgain(t *testing.T) {
	s := newBench(t, plain)
	rec := testRecord(s.asked().Target)
	rec.Boot, rec.ReadOnly = s.b.boot, true
	nodes := check.Value(filepath.Glob("/dev/*"))(t)
	at := slices.IndexFunc(nodes, func(path string) bool {
		rec.Device = claim.Identify(path)
		return rec.Device.Kind == volume.BlockDevice
	})
	check.Needs(t, at >= 0, "a block device")
	fd := check.Value(unix.Open(nodes[at], unix.O_PATH|unix.O_CLOEXEC, 0))(t) // it names the device: nothing can be set by it
	cfg := s.b.cfg
	name := strings.ToUpper(strconv.FormatUint(uint64(rec.Device.Major)<<20|uint64(rec.Device.Minor), 36))
	cfg.Kept = map[string]*os.File{name: os.NewFile(uintptr(fd), "kept")}
	s.start(cfg)
	check.Must(t, s.b.store.put(rec))
	s.b.table.add(rec)
	check.Must(t, s.b.claims.Reclaim(t.Context(), rec.claim()))
	s.wants(check.Err(s.b.restorer.restoreRecord(t.Context(), rec)), volume.Internal, "cannot be made read-only")
	s.saw()
}

// TestRestart continues with what is on record.
func TestRestart(t *testing.T) {
	removed := []string{"retract claimed removing", "unguard claimed removing", "free claimed removing", "leaving claimed removing"}
	for name, c := range map[string]struct {
		before       func(*bench)
		loaded, want string // what exists after Load, and after Reconcile
		steps        []string
	}{
		"a volume":        {func(*bench) {}, "claimed volumes", "claimed volumes", []string{"guard claimed volumes", "publish claimed volumes"}},
		"a begun removal": {func(s *bench) { check.Must(s, s.b.store.beginRemoval(s.key)) }, "claimed removing", "", removed},
		"a begun removal of a device that is open": {func(s *bench) {
			s.fail["free"] = errOpen
			check.Must(s, s.b.store.beginRemoval(s.key))
		}, "claimed removing", "claimed removing", append(removed[:3:3], removed[2])}, // the second to keep the list of users right
		"another boot": {func(s *bench) {
			rec := *s.b.table.get(s.key).rec
			rec.Boot = "another"
			check.Must(s, s.b.store.put(&rec))
		}, "volumes", "", []string{"retract removing", "unguard removing"}}, // what has the number now is not looked at
		"a damaged record": {func(s *bench) {
			check.Must(s, os.WriteFile(s.b.store.path(volumesDir, s.key), []byte("{"), 0o600))
		}, "volumes", "volumes", nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := publishedBench(t, plain)
			c.before(s)
			s.restart()
			s.is(c.loaded)
			s.saw()
			check.Value(s.b.Reconcile(t.Context()))(t)
			s.saw(c.steps...)
			s.is(c.want)
			s.fail = nil
			check.Value(s.b.Defer(t.Context(), s.asked()))(t)
			s.is("claimed volumes")
		})
	}
}

// TestKeptClaimOfNoVolume stays while the volumes cannot be listed, and while one has no usable record: it may be
// that one's.
func TestKeptClaimOfNoVolume(t *testing.T) {
	lose := func(s *bench) { check.Must(s, os.WriteFile(s.b.store.path(volumesDir, s.key), nil, 0o600)) }
	byKey := func(s *bench) (*volume.Volume, error) { return s.b.ReleaseKey(t.Context(), s.key, false) }
	byTarget := func(s *bench) (*volume.Volume, error) { return s.b.Release(t.Context(), s.asked().Target) }
	for name, c := range map[string]struct {
		before  func(*bench)
		kept    int
		release func(*bench) (*volume.Volume, error)
	}{
		"all are known":      {func(*bench) {}, 0, byTarget},
		"not listed":         {func(s *bench) { s.fail["orphans"] = errStep }, 1, nil},
		"lost, by its key":   {lose, 1, byKey},
		"lost, by its mount": {lose, 1, byTarget},
	} {
		s := publishedBench(t, plain)
		c.before(s)
		cfg := s.b.cfg
		cfg.Kept = map[string]*os.File{"OTHER": check.Value(os.Open(os.DevNull))(t)}
		s.start(cfg)
		check.Must(t, s.b.Load(t.Context()))
		n, problems := s.b.claims.Kept(), s.b.table.allProblems()
		check.That(t, n == c.kept && len(problems) == c.kept && (c.release == nil || c.kept > 0 == strings.Contains(fmt.Sprint(problems), "(unknown target")),
			"%s: %d are kept, and the problems are %v", name, n, problems)
		if c.release == nil {
			continue
		}
		s.fail["free"] = errOpen
		_, err := c.release(s)
		check.That(t, c.kept <= 0 || volume.KindOf(err) == volume.Busy && s.b.claims.Kept() != 0,
			"%s: while somebody has a kept device open: %v", name, err)
		s.fail = nil
		v, err := c.release(s)
		check.That(t, err == nil && s.b.claims.Kept() == 0 && (v.Target == s.asked().Target) != (name == "lost, by its key"),
			"%s: after the release of %+v: %v, %d are kept", name, v, err, s.b.claims.Kept())
	}
}

// TestKeptClaimBesideALostVolume of another device is that of a call that was killed before it wrote a record.
func TestKeptClaimBesideALostVolume(t *testing.T) {
	s := publishedBench(t, plain)
	v := s.b.table.get(s.key).rec.Volume
	s.standing = &v
	check.Must(t, os.WriteFile(s.b.store.path(volumesDir, s.key), nil, 0o600))
	cfg := s.b.cfg
	cfg.Kept = map[string]*os.File{"OTHER": check.Value(os.Open(os.DevNull))(t)}
	s.start(cfg)
	check.Must(t, s.b.Load(t.Context()))
	check.That(t, s.b.table.get(s.key).lost != nil && s.b.claims.Kept() == 0, "a claim that belongs to no volume is kept for a lost one")
}

// TestRemovalBesideTheNextOwner: the volume has its device, whichever record is read first.
func TestRemovalBesideTheNextOwner(t *testing.T) {
	s := publishedBench(t, plain)
	check.Must(t, s.b.store.beginRemoval(s.key))
	next := *s.b.table.get(s.key).rec
	next.Target, next.ResolvedTarget = s.b.cfg.Root+"/next", s.b.cfg.Root+"/next"
	next.Key = volume.KeyOf(next.Target)
	check.Must(t, s.b.store.put(&next))
	s.restart()
	check.That(t, s.b.claims.Has(next.claim()), "its problem: %v", s.b.table.get(next.Key).problem)
}

// TestRestartWithoutTheDevice: nothing is made again for a device that has gone, and a release succeeds.
func TestRestartWithoutTheDevice(t *testing.T) {
	s := publishedBench(t, plain)
	check.Must(t, os.Remove(s.image))
	s.restart()
	check.Value(s.b.Reconcile(t.Context()))(t)
	s.saw()
	s.is("volumes")
	problem := s.b.table.get(s.key).problem
	check.That(t, volume.KindOf(problem) == volume.NotFound, "the volume is shown with %v", problem)
	check.Value(s.b.Release(t.Context(), s.asked().Target))(t)
	s.saw("in-use volumes", "retract removing", "unguard removing", "leaving removing")
	s.is("")
}

// TestDeviceThatVanishedUnderItsVolume is shown, although the claim is still open. Its pod goes on behind guard and projection.
func TestDeviceThatVanishedUnderItsVolume(t *testing.T) {
	check.NeedsRoot(t)
	s := newBench(t, plain)
	rec := testRecord(s.asked().Target)
	rec.Boot, rec.Device = s.b.boot, volume.Device{Kind: volume.BlockDevice, Path: filepath.Join(t.TempDir(), "gone"), Major: 240, Minor: 77}
	check.Must(t, unix.Mknod(rec.Device.Path, unix.S_IFBLK|0o600, int(unix.Mkdev(240, 77))))
	fd := check.Value(unix.Open(rec.Device.Path, unix.O_PATH|unix.O_CLOEXEC, 0))(t)
	cfg := s.b.cfg
	cfg.Kept = map[string]*os.File{strings.ToUpper(strconv.FormatUint(240<<20|77, 36)): os.NewFile(uintptr(fd), "kept")}
	s.start(cfg)
	s.b.table.add(rec)
	repaired, err := s.b.restorer.restoreRecord(t.Context(), rec)
	s.wants(err, volume.NotFound, "is not there")
	check.Equal(t, strings.Join(repaired, ", "), "claim device, mount guard, publish to runtime", "repairs")
}

// TestForcedRelease asks nobody, and remembers who has the device until nobody has, over a restart too.
func TestForcedRelease(t *testing.T) {
	s := publishedBench(t, tracking)
	s.who, s.fail["free"] = "abc", errOpen
	s.wants(check.Err(s.b.ReleaseKey(t.Context(), s.key, false)), volume.Busy, "abc")
	held := filepath.Join(s.b.cfg.StateDir, heldDir)
	check.Must(t, os.Remove(held)) // what cannot be remembered is not done
	_, err := s.b.ReleaseKey(t.Context(), s.key, true)
	s.wants(err, volume.Internal, "cannot be written")
	s.is("claimed volumes")
	check.Must(t, os.Mkdir(held, 0o700))
	s.fail["unguard"] = errStep
	check.Is(t, check.Err(s.b.ReleaseKey(t.Context(), s.key, true)), errStep)
	s.is("claimed removing")
	s.said, s.fail["unguard"] = nil, nil
	check.Value(s.b.ReleaseKey(t.Context(), s.key, true))(t)
	s.saw("retract claimed removing", "unguard claimed removing", "leaving claimed removing", "retract removing", "free")
	s.is("")
	heldAre := func(want int, volumeID string) {
		t.Helper()
		all := s.b.Users().HeldOf(t.Context(), "driver", volumeID)
		check.That(t, len(all) == want, "%s: held are %v", volumeID, all)
	}
	for range 2 {
		heldAre(1, "volume")
		heldAre(0, "another")
		_, err = s.b.Defer(t.Context(), s.asked())
		s.wants(err, volume.Busy, errOpen.Error())
		s.restart()
	}
	s.fail = nil
	heldAre(0, "volume")
	left, err := os.ReadDir(held)
	check.That(t, err == nil && len(left) == 0, "left on record: %v, %v", left, err)
}

// TestLostRecord: a volume without a record is removed only when nobody has it, and a record of another
// device counts only when the one that was assumed is free.
func TestLostRecord(t *testing.T) {
	lose := func(t *testing.T) *bench {
		s := publishedBench(t, plain)
		v := s.b.table.get(s.key).rec.Volume
		s.standing = &v
		check.Must(t, os.Remove(s.b.store.path(volumesDir, s.key)))
		s.restart()
		s.wants(s.b.table.get(s.key).lost, volume.Busy, "stays claimed", v.Target)
		return s
	}
	reconcile := func(s *bench, who string, free error, want string, steps ...string) {
		s.Helper()
		s.who, s.fail = who, map[string]error{"free": free}
		report := check.Value(s.b.Reconcile(s.Context()))(s)
		reported := slices.ContainsFunc(report.Repairs, func(r Repair) bool { return r.Action == "read record" && r.Err != nil })
		check.That(s, reported == (len(s.b.Lost()) > 0), "of a lost volume, or another, it reports %+v", report.Repairs)
		s.saw(steps...)
		s.is(want)
	}
	t.Run("nowhere", func(t *testing.T) {
		s := lose(t)
		reconcile(s, "abc", nil, "claimed", "in-use claimed")
		reconcile(s, "", errStep, "claimed", "in-use claimed", "free claimed", "free claimed")
		s.standing = nil
		reconcile(s, "", nil, "", "in-use claimed", "free claimed", "retract claimed", "unguard claimed", "free claimed", "leaving claimed")
	})
	t.Run("published again", func(t *testing.T) {
		s := lose(t)
		for _, change := range []func(*volume.Instruction){
			func(in *volume.Instruction) { in.Backing = filepath.Join(filepath.Dir(in.Backing), "other") },
			func(in *volume.Instruction) { in.Handler = "other" },
		} {
			in := s.asked()
			change(&in)
			s.wants(check.Err(s.b.Defer(t.Context(), in)), volume.Busy)
			s.is("claimed")
		}
		check.Must(t, os.Remove(filepath.Join(s.b.cfg.StateDir, volumesDir)))
		s.wants(check.Err(s.b.Defer(t.Context(), s.asked())), volume.Busy, "cannot be written", "stays")
		s.saw("check claimed")
		s.is("claimed")
		check.Must(t, os.Mkdir(filepath.Join(s.b.cfg.StateDir, volumesDir), 0o700))
		s.b.handlers.byDefault = "other" // by now
		check.Value(s.b.Defer(t.Context(), s.asked()))(t)
		s.saw("check claimed", "guard claimed volumes", "publish claimed volumes")
		s.is("claimed volumes")
		check.Equal(t, s.b.table.get(s.key).rec.Handler, "kata", "the handler")
	})
	t.Run("published again, of a device that was not known", func(t *testing.T) {
		s := publishedBench(t, plain)
		check.Must(t, os.WriteFile(s.b.store.path(volumesDir, s.key), []byte("{"), 0o600))
		s.restart()
		in := s.asked()
		in.MountFlags = []string{"rbind"}
		s.wants(check.Err(s.b.Defer(t.Context(), in)), volume.Busy, "rbind")
		for step, fails := range map[string]error{"check": volume.Errorf(volume.Unsupported, "%w", errStep), "free": errOpen} {
			s.fail = map[string]error{step: fails}
			s.wants(check.Err(s.b.Defer(t.Context(), s.asked())), volume.Busy, fails.Error())
			s.is("volumes")
		}
		s.fail = nil
		records := filepath.Join(s.b.cfg.StateDir, volumesDir)
		check.Must(t, os.Rename(records, records+".away"))
		s.wants(check.Err(s.b.Defer(t.Context(), s.asked())), volume.Busy, "cannot be written")
		check.Must(t, os.Rename(records+".away", records))
		s.is("volumes")
		s.said = nil
		check.Value(s.b.Defer(t.Context(), s.asked()))(t)
		s.saw("check volumes", "free claimed volumes", "guard claimed volumes", "publish claimed volumes")
		s.is("claimed volumes")
	})
	for _, released := range []bool{false, true} {
		t.Run(fmt.Sprint("unreadable for a moment, and released: ", released), func(t *testing.T) {
			s := publishedBench(t, plain)
			path, away := s.b.store.path(volumesDir, s.key), filepath.Join(s.b.cfg.StateDir, "away")
			check.Must(t, os.Rename(path, away))
			check.Must(t, os.Mkdir(path, 0o700))
			s.restart()
			reconcile(s, "", nil, "volumes")
			check.Must(t, errors.Join(os.Remove(path), os.Rename(away, path)))
			if released {
				unlock := check.Value(s.b.locks.lock(t.Context(), s.key))(t)
				s.wants(check.Err(s.b.Release(check.Within(t, time.Millisecond), s.asked().Target)), volume.Timeout, "still under way")
				check.That(t, s.b.table.get(s.key).lost != nil, "its record was taken up beside another operation")
				unlock()
				_, err := s.b.Release(t.Context(), s.asked().Target)
				check.That(t, err == nil && slices.Contains(s.said, "leaving claimed removing"), "%v; steps: %q", err, s.said)
				return
			}
			reconcile(s, "abc", nil, "claimed volumes", "guard claimed volumes", "publish claimed volumes")
		})
	}
	t.Run("another device", func(t *testing.T) {
		s := lose(t)
		rec := &record{Version: recordVersion, Boot: s.b.boot, Volume: *s.standing}
		rec.Device = claim.Identify(filepath.Join(filepath.Dir(s.image), "other"))
		check.Must(t, s.b.store.put(rec))
		reconcile(s, "abc", nil, "claimed volumes", "in-use claimed volumes")
		s.wants(check.Err(s.b.Defer(t.Context(), s.asked())), volume.Busy, "which has to be free first")
		s.wants(check.Err(s.b.Release(t.Context(), s.asked().Target)), volume.Busy, "which has to be free first")
		reconcile(s, "", errOpen, "claimed volumes", "in-use claimed volumes", "free claimed volumes", "free claimed volumes")
		reconcile(s, "", nil, "volumes", "in-use claimed volumes", "free claimed volumes", "free claimed volumes", "guard volumes", "publish volumes")
		check.That(t, s.b.claims.Has(rec.claim()), "the device of the record is not claimed")
	})
}

// TestNewerRecordIsLeftAlone whether a field has another type or not, until the node boots. Its volume is published again.
func TestNewerRecordIsLeftAlone(t *testing.T) {
	for _, boot := range []string{"", "another"} {
		for _, flags := range []any{[]string{"noatime"}, "of another type"} {
			for _, dir := range []string{volumesDir, removingDir} {
				s := publishedBench(t, plain)
				path, fields := s.b.store.path(volumesDir, s.key), map[string]any{}
				check.Must(t, json.Unmarshal(check.Value(os.ReadFile(path))(t), &fields))
				fields["version"], fields["mountFlags"], fields["boot"] = recordVersion+1, flags, cmp.Or(boot, s.b.boot)
				before := check.Value(json.Marshal(fields))(t)
				check.Must(t, errors.Join(os.Remove(path), os.WriteFile(s.b.store.path(dir, s.key), before, 0o600)))
				s.restart()
				check.Value(s.b.Reconcile(t.Context()))(t)
				if _, same := flags.([]string); boot != "" && same && dir == removingDir {
					s.is("")
					continue
				}
				s.wants(check.Err(s.b.Defer(t.Context(), s.asked())), volume.Busy, errNewerRecord.Error(), dir)
				s.saw()
				after, err := os.ReadFile(s.b.store.path(dir, s.key))
				check.That(t, bytes.Equal(before, after), "the record is %s, %v", after, err)
			}
		}
	}
}

// TestBegunRemovalWithoutARecord: a sandbox may have a device that is not known any more.
func TestBegunRemovalWithoutARecord(t *testing.T) {
	for name, c := range map[string]struct {
		end func(s *bench, path string, whole []byte)
		is  string // while somebody has the device
	}{
		"read again": {end: func(s *bench, path string, whole []byte) { check.Must(s, os.WriteFile(path, whole, 0o600)) }, is: "claimed removing"},
		"no file":    {end: func(s *bench, path string, _ []byte) { check.Must(s, os.Remove(path)) }},
		"by force":   {end: func(s *bench, _ string, _ []byte) { check.Value(s.b.ReleaseKey(s.Context(), s.key, true))(s) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := publishedBench(t, plain)
			check.Must(t, s.b.store.beginRemoval(s.key))
			path := s.b.store.path(removingDir, s.key)
			whole := check.Value(os.ReadFile(path))(t)
			check.Must(t, os.WriteFile(path, whole[1:], 0o600))
			s.fail["free"] = errOpen
			s.restart()
			check.Value(s.b.Reconcile(t.Context()))(t)
			_, byKey := s.b.ReleaseKey(t.Context(), s.key, false)
			_, byTarget := s.b.Release(t.Context(), s.asked().Target)
			_, again := s.b.Defer(t.Context(), s.asked())
			for _, err := range []error{byKey, byTarget, again} {
				s.wants(err, volume.Busy, path)
			}
			s.saw()
			s.is("removing")
			c.end(s, path, whole)
			check.Value(s.b.Reconcile(t.Context()))(t)
			s.is(c.is)
			s.fail = nil
			check.Value(s.b.Reconcile(t.Context()))(t)
			s.is("")
		})
	}
}

// TestWhenAReleaseEndsOrphans: only if it may, and somebody has had the device of a known user open for a while.
func TestWhenAReleaseEndsOrphans(t *testing.T) {
	held := &claim.HeldError{By: openers.Users{Names: "process 1"}}
	for name, c := range map[string]struct {
		auto       bool
		cause      error
		since      time.Duration
		user, boot string
		tried      bool
	}{
		"it may":         {true, held, time.Hour, "uid", "", true},
		"the kernel":     {true, &claim.HeldError{By: openers.Users{Kernel: true}}, time.Hour, "uid", "", false},
		"not configured": {false, held, time.Hour, "uid", "", false},
		"another cause":  {true, errStep, time.Hour, "uid", "", false},
		"not listed":     {true, held, 0, "uid", "", false},
		"a moment ago":   {true, held, time.Second, "uid", "", false},
		"no user":        {true, held, time.Hour, "", "", false},
		"another boot":   {true, held, time.Hour, "uid", "another", false},
		"it has ended":   {true, held, time.Hour, "uid", "", false},
	} {
		s := publishedBench(t, tracking)
		s.holders, s.b.orphans.auto = []openers.Holder{{}}, c.auto
		if name == "it has ended" {
			s.holders[0].PID = 1 << 30
		}
		rec := *s.b.table.get(s.key).rec
		rec.PodUID, rec.Boot = c.user, cmp.Or(c.boot, rec.Boot)
		if c.since > 0 {
			s.b.users.Force(claim.Held{Volume: &rec.Volume, Since: time.Now().Add(-c.since)}, func(*volume.Volume) {})
		}
		err := s.b.orphans.clear(t.Context(), &rec, c.cause)
		check.That(t, errors.Is(err, errCannotEnd) == c.tried && strings.Contains(err.Error(), c.cause.Error()), "%s: %v", name, err)
		if s.fail["free"] = errOpen; c.tried {
			s.b.table.replace(s.key, func(e *entry) { e.rec = &rec })
			s.wants(check.Err(s.b.Release(t.Context(), s.asked().Target)), volume.Busy, errCannotEnd.Error(), "kill -9")
			check.That(t, len(s.ended) == 2 && strings.HasPrefix(s.ended[1], "0 by crust-proxy: volume "), "told: %q", s.ended)
		}
	}
}

// startVMM starts a process that names the sandbox. One that survives a kill is stopped in its exit, by the thread
// of the caller.
func startVMM(t *testing.T, survives bool) *exec.Cmd {
	t.Helper()
	vmm := exec.Command("sh", "-c", "read line", sandboxID)
	vmm.SysProcAttr = &syscall.SysProcAttr{Ptrace: survives}
	_ = check.Value(vmm.StdinPipe())(t)
	check.Must(t, vmm.Start())
	if survives {
		check.Value(unix.Wait4(vmm.Process.Pid, nil, 0, nil))(t) // its exec
		check.Must(t, syscall.PtraceSetOptions(vmm.Process.Pid, unix.PTRACE_O_TRACEEXIT))
		check.Must(t, syscall.PtraceCont(vmm.Process.Pid, 0))
	}
	t.Cleanup(func() { _ = vmm.Process.Kill() })
	check.Eventually(t, "its arguments", func() bool { // which follow the exec that Start waits for
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", vmm.Process.Pid))
		return strings.Contains(string(args), sandboxID)
	})
	return vmm
}

// TestOrphanBesideTheNextSandbox of a pod that stays is shown, and ended if it is still one a while later.
func TestOrphanBesideTheNextSandbox(t *testing.T) {
	s := newBench(t, tracking)
	s.published()
	vmm := startVMM(t, false)
	s.holders, s.b.orphans.auto = []openers.Holder{{PID: vmm.Process.Pid}}, true
	reconcile := func(problem bool, steps ...string) {
		t.Helper()
		check.Value(s.b.Reconcile(t.Context()))(t)
		if got := s.b.table.get(s.key).problem; problem {
			s.wants(got, volume.Busy, fmt.Sprint("process ", vmm.Process.Pid), sandboxID, "crustctl end")
		} else {
			check.Must(t, got)
		}
		s.saw(steps...)
	}
	s.b.table.replace(s.key, func(e *entry) {
		rec := *e.rec
		rec.PodUID, e.rec = "uid", &rec
	})
	restored := []string{"guard claimed volumes", "publish claimed volumes", "disowned claimed volumes"}
	reconcile(false, restored[:2]...)
	s.several, s.fail["disowned"] = true, errStep
	reconcile(false, append(restored[:3:3], "forget-ended true claimed volumes")...)
	ctx, cancel := context.WithCancel(t.Context())
	s.timeUp = cancel
	s.wants(s.b.orphans.look(ctx, s.b.table.get(s.key)), volume.Busy, "could not be found out")
	s.timeUp, s.said, s.fail["disowned"] = nil, nil, nil
	for range 2 {
		reconcile(true, restored...)
	}
	check.Equal(t, len(s.ended), 0, "orphans that were ended")
	s.fail["disowned"] = volume.Errorf(volume.Busy, "the runtime cannot be asked")
	reconcile(true, append(restored[:3:3], "forget-ended true claimed volumes")...)
	check.Empty(t, s.b.orphans.seen(), "volumes whose orphans were found twice in turn")
	s.fail["disowned"] = nil
	in := s.asked()
	check.Must(t, check.Err(s.b.Defer(t.Context(), in)))
	s.said = nil
	reconcile(true, restored...)
	seen, _ := errors.AsType[*orphanError](s.b.table.get(s.key).problem)
	seen.since = seen.since.Add(-orphanTime)
	check.Value(s.b.Reconcile(t.Context()))(t)
	check.Fails(t, vmm.Wait(), "killed")
	check.Equal(t, strings.Join(s.ended, ", "), fmt.Sprint(vmm.Process.Pid, " by crust-proxy: <nil>"), "told")
	next := startVMM(t, false) // of the sandbox that came after it
	s.holders, s.said = []openers.Holder{{PID: next.Process.Pid}}, nil
	s.fail["disowned"] = volume.Errorf(volume.Busy, "the runtime lists it")
	reconcile(false, append(restored[:3:3], "forget-ended true claimed volumes")...)
	s.holders = nil
	reconcile(false, restored[:2]...) // who sees no process, as without the host's PIDs, forgets no sandbox
}

// TestOrphanThatSurvives is no orphan that was ended, as where its storage hangs. It is told by whom. Of one that has
// ended, another process having the device, that is known without a scan of all processes.
func TestOrphanThatSurvives(t *testing.T) {
	s := publishedBench(t, tracking)
	s.fail["holders"] = errors.New("others may have it too")
	end := func(open error, survives bool, want string) (vmm *exec.Cmd) {
		t.Helper()
		vmm = startVMM(t, survives)
		s.holders, s.ended, s.fail["free"] = []openers.Holder{{PID: vmm.Process.Pid}}, nil, open
		ctx, cancel := context.WithCancel(t.Context())
		s.timeUp = cancel
		_, err := s.b.Users().EndOrphans(ctx, s.key, []int{vmm.Process.Pid}, "hand")
		told := fmt.Sprint(vmm.Process.Pid, " by hand: ", want)
		check.Require(t, (err != nil) == survives && len(s.ended) == 1 && strings.HasPrefix(s.ended[0], told), "%v; told: %q", err, s.ended)
		return vmm
	}
	for _, open := range []error{nil, errOpen} {
		check.Fails(t, end(open, false, "<nil>").Wait(), "killed")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s.b.orphans.patience = 0
	vmm := end(errOpen, true, "it was killed and has not ended in 10s")
	check.Value(unix.Wait4(vmm.Process.Pid, nil, 0, nil))(t) // its exit
	check.Must(t, syscall.PtraceDetach(vmm.Process.Pid))
	check.Fails(t, vmm.Wait(), "killed")
}

// TestHeldOfAVolume are those of the driver's volume alone.
func TestHeldOfAVolume(t *testing.T) {
	s := publishedBench(t, plain)
	s.fail["free"] = errOpen
	v := s.b.table.get(s.key).rec.Volume
	unknown := v
	unknown.Key, unknown.Origin = "unknown", nil
	for _, one := range []*volume.Volume{&v, &unknown} {
		s.b.users.Force(claim.Held{Volume: one, Since: time.Now()}, func(*volume.Volume) {})
	}
	for of, want := range map[[2]string]int{{"driver", "volume"}: 1, {"driver", "other"}: 0, {"other", "volume"}: 0} {
		got := s.b.Users().HeldOf(t.Context(), of[0], of[1])
		check.That(t, len(got) == want, "%v: %+v", of, got)
	}
}
