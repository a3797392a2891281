//go:build system

package broker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// counting is one for all tests: to make it takes some time.
var counting = sync.OnceValue(openers.New)

func finders(t *testing.T) map[openers.Method]*openers.Finder {
	t.Helper()
	if method, why := counting().Method(); method != openers.Counts {
		rig.Missing(t, "the kernel's count: "+why.Error())
	}
	return map[openers.Method]*openers.Finder{openers.Counts: counting(), openers.Scans: openers.NewScanner(errors.New("test"))}
}

// use restarts the broker with a finder.
func (n *node) use(finder *openers.Finder) {
	n.t.Helper()
	n.cfg.Openers = finder
	n.restart()
}

type opener struct {
	name string
	// open has somebody open the disk until end is called. The refusals say who.
	open func(t *testing.T, disk string) (end func(), who string)
	// atStage is the kind of a refused stage. An unstage, that of a mount too, is to be repeated.
	atStage volume.Kind
	// thorough is set if it is asked about again after a restart and a forced release.
	thorough bool
	// handler, if set, is the handler whose volumes can have such openers, and filesystem what is on the disk.
	handler, filesystem string
}

// ordinaryOpeners are processes and parts of the kernel that have a device open. How each kind is found,
// test/openers has.
func ordinaryOpeners() []opener {
	return []opener{
		{name: "a descriptor", open: shell("<>"), atStage: volume.Busy},
		{name: "a read-only descriptor", open: shell("<"), atStage: volume.Busy, thorough: true},
		{name: "a descriptor by another name", open: func(t *testing.T, disk string) (func(), string) {
			node := filepath.Join(t.TempDir(), "disk")
			check.Must(t, unix.Mknod(node, unix.S_IFBLK|0o600, rdev(t, disk)))
			return shell("<>")(t, node)
		}, atStage: volume.Busy},
		{name: "a process in other namespaces", open: inAllNamespaces, atStage: volume.Busy},
		{name: "a mount in another namespace", open: func(t *testing.T, disk string) (func(), string) {
			return mountAway(t, disk), "a mount in another namespace"
		}, atStage: volume.InUse, thorough: true, handler: "host", filesystem: "ext4"},
		{name: "a loop device", open: func(t *testing.T, disk string) (func(), string) {
			loop := rig.Loop(t, disk, loopdev.Options{})
			by := rig.Hold(t, "<", loop) // one that nobody has open is no user
			return func() { by.End(); check.Must(t, loopdev.Detach(loop)) }, loop
		}, atStage: volume.InUse},
	}
}

func pidOf(by *rig.Holder) string { return fmt.Sprintf("process %d ", by.Process.Pid) }

func shell(how string) func(*testing.T, string) (func(), string) {
	return func(t *testing.T, disk string) (func(), string) {
		t.Helper()
		by := rig.Hold(t, how, disk)
		return by.End, pidOf(by)
	}
}

func inAllNamespaces(t *testing.T, disk string) (end func(), who string) {
	t.Helper()
	cmd := exec.Command("sh", "-c", `exec 3<>"$0"; echo open; exec cat`, disk)
	root := []syscall.SysProcIDMap{{Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS, UidMappings: root, GidMappings: root,
	}
	by := rig.HoldBy(t, cmd)
	return by.End, pidOf(by)
}

// TestOpeners: whatever has a device open keeps it from being staged, and a staged one from being
// unstaged, and from going to another volume after a forced release.
func TestOpeners(t *testing.T) {
	for method, finder := range finders(t) {
		for _, kind := range ordinaryOpeners() {
			t.Run(string(method)+"/"+kind.name, func(t *testing.T) {
				t.Parallel() // it waits most of the time
				testOpener(t, finder, kind)
			})
		}
	}
}

func testOpener(t *testing.T, finder *openers.Finder, kind opener) {
	n, store := newMountingNode(t), &fdStore{files: make(map[string]*os.File)}
	n.cfg.Openers, n.cfg.Keeper = finder, store
	n.restartWith(store)
	disk := rig.Disk(t, 32*mib, kind.filesystem)
	in, next := n.instruction("pod-1", disk), n.instruction("pod-2", disk)
	in.Handler = kind.handler

	end, who := kind.open(t, disk)
	check.Kind(t, check.Err(n.Defer(t.Context(), in)), kind.atStage, who)
	n.noLeftovers()
	end()
	n.goesOn(func() error { _, err := n.Defer(t.Context(), in); return err })

	end, who = kind.open(t, disk)
	n.keeps(in.Target, who)
	if kind.thorough {
		n.restartWith(store)
		n.keeps(in.Target, who)
		check.Must(t, check.Err(n.ReleaseKey(t.Context(), volume.KeyOf(in.Target), true)))
		n.noLeftovers()
		n.wantHeld(in.Target, who)
		check.Kind(t, check.Err(n.Defer(t.Context(), next)), kind.atStage, who)
		end()
		n.goesOn(func() error { _, err := n.Defer(t.Context(), next); return err })
		in = next
	}
	end()
	n.goesOn(func() error { _, err := n.Release(t.Context(), in.Target); return err })
	check.Must(t, check.Err(n.Reconcile(t.Context())))
	check.Empty(t, n.Users().Held(), "still held")
	wantHeld(t, disk, false)
	n.noLeftovers()
}

// keeps checks that a volume is not released, and listed as held.
func (n *node) keeps(target, who string) {
	n.t.Helper()
	_, err := n.Release(n.t.Context(), target)
	check.That(n.t, volume.KindOf(err) == volume.Busy && err != nil && strings.Contains(err.Error(), who), "released beside %s: %v", who, err)
	n.wantHeld(target, who)
	status, ok := n.Get(volume.KeyOf(target))
	check.That(n.t, ok && !status.Removing && status.Held != nil, "a refused unstage changed something, or is not shown: %+v", status)
}

func (n *node) wantHeld(target, who string) {
	n.t.Helper()
	held := n.Users().Held()
	check.That(n.t, len(held) == 1 && held[0].Volume.Target == target && strings.Contains(held[0].Processes, who), "held: %+v, not by %s", held, who)
}

// goesOn repeats a call as kubelet does until it succeeds: the kernel ends a namespace or a ring some
// time after its last process.
func (n *node) goesOn(call func() error) {
	n.t.Helper()
	check.Succeeds(n.t, "a repeated call", func() error {
		err := call()
		kind := volume.KindOf(err)
		check.Require(n.t, err == nil || kind == volume.Busy || kind == volume.InUse, "%v", err)
		return err
	})
}

// TestOpenersThatComeAndGo has processes open and close a device all the time. A call that succeeds
// had a moment at which nobody had it open: the count sees that of all at once, a scan that of each.
// While the volume is staged, nobody has the device exclusively.
func TestOpenersThatComeAndGo(t *testing.T) {
	for method, finder := range finders(t) {
		t.Run(string(method), func(t *testing.T) {
			w := &window{node: newNode(t)}
			w.use(finder)
			disk := rig.Disk(t, 16*mib, "")
			exclusive := startFlapper(t, "flap exclusively", disk)
			all := []*flapper{startFlapper(t, "flap", disk), exclusive}
			if method == openers.Counts {
				all = append(all, startFlapper(t, "flap", disk))
			}
			w.run(w.instruction("pod-1", disk), func() [][]span { return groups(method, all) })
			for _, f := range all {
				f.end()
			}
			w.check(groups(method, all), exclusive.spans())
		})
	}
}

// groups are the times at which nobody may have got the device: in each, all of it.
func groups(method openers.Method, all []*flapper) (out [][]span) {
	for _, f := range all {
		out = append(out, f.spans())
	}
	if method == openers.Counts {
		out = [][]span{slices.Concat(out...)}
	}
	return out
}

// window is a node that stages and unstages one volume, and when.
type window struct {
	*node
	proven  int64  // when the last call had proven that nobody has the device
	got     []span // calls that succeeded, from their beginning until that
	refused []span
	staged  []span
}

// leaving is the window's observer.
type leaving struct {
	deferral.NoObserver
	window *window
}

func (l leaving) Leaving(*volume.Volume) { l.window.proven = now() }

// run stages and unstages for some time, until enough has happened: calls that succeeded, and such
// that had to be refused.
func (w *window) run(in volume.Instruction, openers func() [][]span) {
	w.t.Helper()
	w.cfg.Observer = leaving{window: w}
	w.runtime.failing = func() error { w.proven = now(); return nil }
	w.restart()
	const enough = 20
	began, isStaged := time.Now(), false
	for time.Since(began) < 2*time.Second || len(w.got) < enough || len(covered(w.refused, openers())) < enough {
		check.Require(w.t, time.Since(began) <= 3*time.Minute, "this tests nothing: %d calls succeeded, and %d of %d had to be refused",
			len(w.got), len(covered(w.refused, openers())), len(w.refused))
		for range 10 {
			isStaged = w.call(in, isStaged)
		}
	}
	if isStaged {
		w.goesOn(func() error { _, err := w.Release(w.t.Context(), in.Target); return err })
	}
}

// call stages or unstages the volume, with little patience.
func (w *window) call(in volume.Instruction, isStaged bool) bool {
	w.t.Helper()
	moment(20 * time.Millisecond) // the last call may just have found that nobody has the device
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Millisecond+rand.N(30*time.Millisecond))
	defer cancel()
	begin, after := now(), w.proven
	var err error
	if isStaged {
		_, err = w.Release(ctx, in.Target)
	} else {
		_, err = w.Defer(ctx, in)
	}
	switch kind := volume.KindOf(err); {
	case err == nil:
		w.got = append(w.got, span{begin, w.proven})
		if isStaged {
			w.staged = append(w.staged, span{after, begin})
		}
		return !isStaged
	case kind != volume.Busy && kind != volume.InUse && ctx.Err() == nil:
		w.t.Fatal(err)
	}
	w.refused = append(w.refused, span{begin, now()})
	return isStaged
}

// covered returns those of some times during which somebody of a group always had the device.
func covered(times []span, groups [][]span) (out []span) {
	for _, group := range groups {
		slices.SortFunc(group, func(a, b span) int { return int(a.from - b.from) })
		for _, one := range times {
			reached := one.from
			for _, had := range group {
				if had.from <= reached {
					reached = max(reached, had.to)
				}
			}
			if reached >= one.to {
				out = append(out, one)
			}
		}
	}
	return out
}

func (w *window) check(groups [][]span, exclusive []span) {
	w.t.Helper()
	w.t.Logf("%d calls succeeded, and %d of %d had to be refused", len(w.got), len(covered(w.refused, groups)), len(w.refused))
	check.Empty(w.t, covered(w.got, groups), "calls succeeded, and somebody always had the device open")
	for _, staged := range w.staged {
		for _, had := range exclusive {
			check.That(w.t, had.from >= staged.to || staged.from >= had.to,
				"staged during %v, and somebody had the device exclusively during %v", staged, had)
		}
	}
	w.noLeftovers()
}

// lateStore closes its copies some time after it said so, as systemd does.
type lateStore struct{ fdStore }

func (s *lateStore) RemoveFD(name string) error {
	file := s.files[name]
	delete(s.files, name)
	if file != nil {
		time.AfterFunc(rand.N(2*time.Millisecond), func() { _ = file.Close() })
	}
	return nil
}

// TestReleasedDeviceIsFree at once, for a driver that detaches it, whatever programs this process
// starts meanwhile: each of them has all our descriptors for a moment.
func TestReleasedDeviceIsFree(t *testing.T) {
	finder := finders(t)[openers.Counts]
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var starting sync.WaitGroup
	for range 4 {
		starting.Go(func() {
			for ctx.Err() == nil && !t.Failed() {
				check.NoError(t, exec.Command("true").Run(), "true")
			}
		})
	}
	for _, kept := range []bool{false, true} {
		for _, handler := range []string{"fake", "host"} {
			t.Run(fmt.Sprintf("%s, kept %t", handler, kept), func(t *testing.T) {
				n := newMountingNode(t)
				if kept {
					n.cfg.Keeper = &lateStore{fdStore{files: make(map[string]*os.File)}}
				}
				n.use(finder)
				in := n.instruction("pod-1", rig.Disk(t, 16*mib, ""))
				in.Handler = handler
				var busy []string
				for range 150 {
					n.stage(in)
					n.unstage(in.Target)
					busy = append(busy, namesOf(t, finder, in.Backing)...)
				}
				// Daemons of other tests look at all loop devices: a few times, and a copy of ours is there in one of five.
				check.That(t, len(busy) <= 5, "the released device is open in %q", busy)
				n.noLeftovers()
			})
		}
	}
	cancel()
	starting.Wait()
}

// namesOf says who has a device open.
func namesOf(t *testing.T, finder *openers.Finder, disk string) []string {
	t.Helper()
	fd := check.Value(openDisk(disk, unix.O_RDONLY|unix.O_EXCL))(t)
	users, err := finder.Await(t.Context(), openers.Query{FD: fd, Own: 1, Claimed: true}, 0)
	sys.CloseAlone(fd)
	check.Must(t, err)
	return slices.DeleteFunc([]string{users.Names}, func(names string) bool { return names == "" })
}

// TestServerThatStoresOnADevice is a user of it, although its opens of the device that it serves do not count.
func TestServerThatStoresOnADevice(t *testing.T) {
	n := parallelNode(t)
	n.cfg.Devices.Servers = []string{"qemu-nbd"}
	server := filepath.Join(t.TempDir(), "qemu-nbd")
	rig.Command(t, "cp", "/bin/cat", server) // a child of another test's could still have it open for writing if we wrote it
	disk := rig.Disk(t, 16*mib, "")
	for _, finder := range finders(t) {
		n.use(finder)
		holder := rig.HoldBy(t, exec.Command("sh", "-c", `exec 3<>"$0"; echo open; exec "$1"`, disk, server))
		check.Eventually(t, "the shell has become the server", func() bool {
			return check.Value(sys.ReadLine(fmt.Sprintf("/proc/%d/comm", holder.Process.Pid)))(t) == "qemu-nbd"
		})
		check.Kind(t, check.Err(n.Defer(t.Context(), n.instruction("pod-1", disk))), volume.Busy)
		holder.End()
	}
	n.noLeftovers()
}
