package crust

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
)

// fileTick is more than the grain of a file's times, which is a tick of the kernel's clock.
const fileTick = 20 * time.Millisecond

// tracker is a container runtime that knows these sandboxes.
type tracker struct {
	mu   sync.Mutex
	pods map[string]string
}

func (k *tracker) Ready() bool { return true }
func (k *tracker) PodOf(id string) (string, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	pod, known := k.pods[id]
	return pod, known
}

func (k *tracker) set(id, pod string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pods == nil {
		k.pods = make(map[string]string)
	}
	if k.pods[id] = pod; pod == "" {
		delete(k.pods, id)
	}
}

func newWatchedBench(t *testing.T) (*bench, *tracker, *handlers.Changes) {
	t.Helper()
	var seen handlers.Changes
	known := &tracker{}
	b := newBench(t, bySocket|byProgram)
	b.stop()
	b.cfg.OnChange, b.sandboxes = seen.Add, known
	b.start(t)
	watching(t, b)
	return b, known, &seen
}

func watching(t *testing.T, b *bench) {
	t.Helper()
	probe := published(t, b, "probe")
	check.Eventually(t, "the watch runs", func() bool { return b.h.store.Watch.Has(probe.Key) })
	check.Must(t, b.h.Retract(t.Context(), probe))
}

func boundTo(b *bench, v *volume.Volume, id string) func() bool {
	return func() bool { return handlers.BoundTo(b.h, v, id) }
}

func (b *bench) files(t *testing.T, v *volume.Volume) []string {
	t.Helper()
	entries := check.Value(os.ReadDir(b.path(v, "")))(t)
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func onlyInfo(t *testing.T, b *bench, v *volume.Volume) func() bool {
	return func() bool { return slices.Equal(b.files(t, v), []string{abi.InfoName}) }
}

// TestHungSandboxesDelayNoClearing: each is asked for some seconds whether it lives.
func TestHungSandboxesDelayNoClearing(t *testing.T) {
	b, known, _ := newWatchedBench(t)
	for _, name := range []string{"c", "d", "e", "f", "g", "h"} {
		v := published(t, b, name)
		known.set("hung-"+name, v.PodUID)
		b.startSandbox(t, v, "hung-"+name).set("hang")
		b.h.cleaner.enqueue(job{key: v.Key})
	}
	v := published(t, b, "a")
	known.set("sb1", v.PodUID)
	b.startSandbox(t, v, "sb1")
	check.Eventually(t, "bound", boundTo(b, v, "sb1"))
	began := time.Now()
	known.set("sb1", "")
	b.h.SandboxGone("sb1")
	check.Eventually(t, "what it left is gone", onlyInfo(t, b, v))
	check.That(t, time.Since(began) < 4*verifyTime, "it took %v", time.Since(began))
}

// A sandbox that ends while it is asked is not bound again by the end of the question.
func TestSandboxThatEndsWhileAskedStaysUnbound(t *testing.T) {
	b, known, _ := newWatchedBench(t)
	v := published(t, b, "a")
	known.set("sb1", v.PodUID)
	b.startSandbox(t, v, "sb1").set("hang")
	check.Eventually(t, "bound", boundTo(b, v, "sb1"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := check.Begin(func() error { return check.Err(b.h.Stats(ctx, v)) })
	check.Eventually(t, "it is asked", func() bool { return b.agent.asked.Load() > 0 })
	known.set("sb1", "")
	b.h.SandboxGone("sb1")
	check.Eventually(t, "what it left is gone", onlyInfo(t, b, v))
	cancel()
	handlers.WantError(t, <-done, volume.Canceled, v, "sb1")
	check.That(t, boundTo(b, v, "")(), "bound to a sandbox that is gone")
}

// What a dead sandbox left goes with its word that it has nothing, whoever asks.
func TestDeadSandboxIsClearedAwayByItsAnswer(t *testing.T) {
	for _, w := range []way{bySocket, byProgram} {
		b := newBench(t, w)
		v := published(t, b, "a")
		b.startSandbox(t, v, "sb1").Kill(t)
		handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1")
		check.That(t, onlyInfo(t, b, v)(), "left: %v", b.files(t, v))
		handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "no sandbox")
	}
}

// What came while the dead one was asked stays, and is asked next.
func TestNewSandboxIsNotClearedAway(t *testing.T) {
	b := newBench(t, byProgram)
	v := published(t, b, "a")
	b.startSandbox(t, v, "old")
	seen := check.Value(b.h.bindings.readDir(v))(t)
	time.Sleep(fileTick)
	b.startSandbox(t, v, "new")
	check.That(t, b.h.cleaner.clear(v, seen), "the new sandbox was not seen")
	got := b.files(t, v)
	check.That(t, slices.Equal(got, []string{abi.InfoName, "new", abi.CLIName}), "left: %v", got)
	// A sandbox of the same name that left its file anew is another one, too.
	seen = check.Value(b.h.bindings.readDir(v))(t)
	time.Sleep(fileTick)
	b.startSandbox(t, v, "new")
	check.That(t, b.h.cleaner.clear(v, seen) && len(b.files(t, v)) == 3, "left: %v", b.files(t, v))
}

// The reconciler publishes again, and so finds what a restart slept through.
func TestReconcileClearsAwayTheDead(t *testing.T) {
	b, known, _ := newWatchedBench(t)
	v, living := published(t, b, "a"), published(t, b, "b")
	known.set("alive", living.PodUID)
	b.startSandbox(t, v, "dead").Kill(t)
	b.startSandbox(t, living, "alive")
	published(t, b, "a")
	published(t, b, "b")
	check.Eventually(t, "the dead one is cleared away", onlyInfo(t, b, v))
	// Also where another one lives.
	known.set("next", v.PodUID)
	b.startSandbox(t, v, "dead").Kill(t)
	time.Sleep(fileTick) // the newest file tells the newest sandbox
	b.startSandbox(t, v, "next")
	published(t, b, "a")
	check.Eventually(t, "the dead one is cleared away", func() bool { return !slices.Contains(b.files(t, v), "dead") })
	got := b.files(t, v)
	check.That(t, len(got) == 4, "of the living one is left: %v", got)
	b.stats(t, v)
	got = b.files(t, living)
	check.That(t, len(got) == 4, "of the living one is left: %v", got)
	// One that the container runtime has not told of yet is asked, and lives.
	early := published(t, b, "c")
	b.startSandbox(t, early, "early")
	published(t, b, "c")
	check.Eventually(t, "bound", boundTo(b, early, "early"))
	time.Sleep(50 * time.Millisecond)
	got = b.files(t, early)
	check.That(t, len(got) == 4, "of the new one is left: %v", got)
}

// A sandbox that came while its predecessor was asked is not known to the container runtime yet. Its files stay.
func TestNewerSandboxIsNotClearedAwayByAnOlderOne(t *testing.T) {
	b, known, _ := newWatchedBench(t)
	v := published(t, b, "a")
	b.startSandbox(t, v, "dead").Kill(t)
	time.Sleep(fileTick)
	b.startSandbox(t, v, "old")
	known.set("old", v.PodUID)
	c := *b.h.cleaner
	c.inUse = func(context.Context, *volume.Volume) (string, error) {
		time.Sleep(fileTick)
		b.startSandbox(t, v, "new")
		return "old", nil
	}
	c.do(t.Context(), job{key: v.Key})
	files := b.files(t, v)
	check.That(t, slices.Contains(files, "new") && slices.Contains(files, "old") && !slices.Contains(files, "dead"), "left: %v", files)
}

// A handler that changes the directory is waited for.
func TestClearingWaitsForTheLock(t *testing.T) {
	b := newBench(t, byProgram)
	v := published(t, b, "a")
	b.startSandbox(t, v, "sb1").Kill(t)
	dir := check.Value(abi.Open(b.cfg.Root, string(v.Key)))(t)
	defer func() { check.Must(t, dir.Close()) }()
	check.Must(t, dir.Lock(time.Second))
	done := check.Begin(func() error { return check.Err(b.h.Stats(t.Context(), v)) })
	time.Sleep(50 * time.Millisecond)
	check.That(t, len(b.files(t, v)) == 3, "changed without the lock")
	check.Must(t, dir.Unlock())
	handlers.WantError(t, <-done, volume.NoSandbox, v, "sb1")
	check.That(t, onlyInfo(t, b, v)(), "left: %v", b.files(t, v))
}

// A handler that is about to say how to ask is waited for.
func TestHalfABindingIsWaitedFor(t *testing.T) {
	b := newBench(t, byProgram)
	v := published(t, b, "a")
	b.startSandbox(t, v, "sb1")
	dir := check.Value(abi.Open(b.cfg.Root, string(v.Key)))(t)
	defer func() { check.Must(t, dir.Close()) }()
	check.Must(t, dir.Lock(time.Second))
	check.Must(t, dir.Remove(abi.CLIName))
	done := check.Begin(func() error { return check.Err(b.h.Stats(t.Context(), v)) })
	time.Sleep(20 * time.Millisecond)
	check.Must(t, dir.Put(abi.CLIName, []byte(b.cfg.Programs[0]+"\n")))
	check.Must(t, dir.Unlock())
	check.Must(t, <-done)
	check.Must(t, dir.Remove(abi.CLIName))
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Unsupported, v, "sb1", "cannot be asked")
}

func TestSandboxOfAnotherPodIsNotBelieved(t *testing.T) {
	b, known, _ := newWatchedBench(t)
	v := published(t, b, "a")
	known.set("other", "pod-of-others")
	b.startSandbox(t, v, "other")
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v)
	check.That(t, boundTo(b, v, "")(), "bound to it")
}

// What cannot be asked is not taken for dead, unless the container runtime says so.
func TestInUseOfWhatCannotBeAsked(t *testing.T) {
	for name, spoil := range map[string]func(*bench, *volume.Volume){
		"what may not be asked": func(b *bench, v *volume.Volume) { b.leave(t, v, "sb1", "/not/allowed", "/not/allowed/either") },
		"a program that is not there": func(b *bench, v *volume.Volume) {
			check.Must(t, os.Remove(b.path(v, abi.SocketName)))
			check.Must(t, os.Remove(b.cfg.Programs[0]))
		},
		"a handler that was killed before it said how to ask": func(b *bench, v *volume.Volume) {
			check.Must(t, os.Remove(b.path(v, abi.SocketName)))
			check.Must(t, os.Remove(b.path(v, abi.CLIName)))
		},
		"a handler without stats": func(b *bench, v *volume.Volume) {
			check.Must(t, os.Remove(b.path(v, abi.SocketName)))
			b.program(t, "runtime", "exit 4")
		},
	} {
		b, known, _ := newWatchedBench(t)
		v := published(t, b, "a")
		known.set("sb1", v.PodUID)
		b.startSandbox(t, v, "sb1")
		spoil(b, v)
		check.Equal(t, check.Value(b.h.InUse(t.Context(), v))(t), "sb1", "%s", name)
		known.set("sb1", "")
		check.Equal(t, check.Value(b.h.InUse(t.Context(), v))(t), "", "%s, of a dead sandbox", name)
		// The file of the living one can be the older one: somebody put the clock back.
		known.set("sb0", v.PodUID)
		check.Must(t, os.WriteFile(b.path(v, "sb0"), nil, 0o600))
		check.Must(t, os.Chtimes(b.path(v, "sb0"), time.Time{}, time.Now().Add(-time.Hour)))
		check.That(t, check.Value(b.h.InUse(t.Context(), v))(t) != "", "%s, beside a living sandbox", name)
	}
}

// Each time that the sandbox is asked it ends, and a new one has the volume. That no live
// one was found is no proof that there is none.
func TestSandboxesThatChangeAllTheTimeAreInUse(t *testing.T) {
	b := newBench(t, byProgram)
	v := published(t, b, "a")
	dir := b.path(v, "")
	b.program(t, "runtime", "sleep 0.01; echo > "+dir+"/.new; mv "+dir+"/.new "+dir+"/sb-$$; exit 3")
	b.startSandbox(t, v, "sb1")
	check.That(t, check.Value(b.h.InUse(t.Context(), v))(t) != "", "it is not in use")
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Busy, v, "try again")
}

func TestAdoptionFollowsTheOtherProgram(t *testing.T) {
	b, _, seen := newWatchedBench(t)
	v := b.Volume("foreign")
	v.ReadOnly, v.Group, v.GroupPolicy = true, "7", volume.GroupAlways
	other := *v
	other.Device.Path = "/images/other"
	check.Must(t, os.Mkdir(b.path(v, ""), 0o700))
	check.Eventually(t, "watched", func() bool { return b.h.store.Watch.Has(v.Key) })
	check.Must(t, os.WriteFile(b.path(v, abi.InfoName), check.Value(abi.Encode(&other))(t), 0o600))
	check.Eventually(t, "adopted", func() bool { return len(b.h.Adopted()) == 1 })
	raw := check.Value(abi.Encode(v))(t)
	file := check.Value(os.Create(b.path(v, abi.InfoName)))(t)
	for part := range slices.Chunk(raw, 20) {
		check.Value(file.Write(part))(t)
	}
	check.Must(t, file.Close())
	check.Eventually(t, "rewritten", func() bool {
		adopted := b.h.Adopted()
		return len(adopted) == 1 && adopted[0].Device.Path == v.Device.Path
	})
	got := b.h.Adopted()[0]
	check.That(t, got.ReadOnly && got.Group == "7" && got.PodUID == v.PodUID && got.Target == v.Target, "adopted as %+v", got)
	// It is served, and what is in it stays, also of the dead.
	sandbox := b.startSandbox(t, v, "sb1")
	check.Eventually(t, "bound", boundTo(b, v, "sb1"))
	sandbox.Kill(t)
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), got)), volume.NoSandbox, v, "sb1")
	check.That(t, len(b.files(t, v)) == 4, "left of it: %v", b.files(t, v))
	check.Must(t, os.RemoveAll(b.path(v, "")))
	check.Eventually(t, "no longer adopted", func() bool { return len(b.h.Adopted()) == 0 })
	check.That(t, seen.Has(v.Key), "nobody was told")
}

func TestOddThingsInTheTree(t *testing.T) {
	b, _, _ := newWatchedBench(t)
	v := published(t, b, "a")
	root := b.cfg.Root + "/"
	check.Must(t, os.Mkdir(root+"odd", 0o700))
	check.Must(t, os.Mkdir(root+strings.Repeat("a", 64), 0o700))
	check.Must(t, os.WriteFile(root+strings.Repeat("b", 64), nil, 0o600))
	check.Must(t, os.Symlink("/", root+strings.Repeat("c", 64)))
	for _, name := range []string{".hidden", "a b", strings.Repeat("x", 200), "ä"} {
		check.Must(t, os.WriteFile(b.path(v, name), nil, 0o600))
	}
	check.Must(t, os.Mkdir(b.path(v, "directory"), 0o700))
	check.Must(t, unix.Mkfifo(b.path(v, "pipe"), 0o600))
	b.stop()
	b.start(t)
	orphans, err := b.h.Orphans(func(volume.Key) bool { return false })
	check.That(t, err == nil && len(orphans) == 1, "orphans: %v, %v", orphans, err)
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v)
	check.Equal(t, len(b.h.Adopted()), 0, "adopted devices")
}

func TestCheck(t *testing.T) {
	b := newBench(t, bySocket)
	for name, c := range map[string]struct {
		change func(*volume.Volume)
		kind   volume.Kind
		text   string
	}{
		"image file": {func(v *volume.Volume) { v.Device.Kind = volume.ImageFile }, volume.Unsupported, "loop device"},
		"filesystem": {func(v *volume.Volume) { v.FSType = "zfs" }, volume.Unsupported, "ext4, xfs, btrfs"},
		"relative":   {func(v *volume.Volume) { v.ResolvedTarget = "x" }, volume.Invalid, "absolute"},
	} {
		v := b.Volume("a")
		c.change(v)
		err := b.h.Check(v)
		check.That(t, volume.KindOf(err) == c.kind && strings.Contains(err.Error(), c.text), "%s: %v", name, err)
	}
	v := b.Volume("a")
	v.Group, v.MountFlags = "0", []string{"noatime", "discard", "_netdev,x-systemd.device-timeout=5"}
	check.Must(t, b.h.Check(v))
}

// TestForeignDirectoryThatGoesBeforeItIsWatched: another program removes it after AdoptForeign and before Run.
func TestForeignDirectoryThatGoesBeforeItIsWatched(t *testing.T) {
	b := newBench(t, bySocket)
	b.stop()
	h := check.Value(New(b.cfg, b.sandboxes, zap.NewNop()))(t)
	gone, stays := b.Volume("gone"), b.Volume("stays")
	b.PublishForeign(t, gone)
	b.PublishForeign(t, stays)
	h.AdoptForeign()
	got := h.Adopted()
	check.Require(t, len(got) == 2, "adopted %v", got)
	check.Must(t, os.RemoveAll(b.path(gone, "")))
	stop := check.Running(t, h.Run)
	check.Eventually(t, "it is not listed any more", func() bool { return len(h.Adopted()) == 1 })
	got = h.Adopted()
	check.That(t, len(got) == 1 && got[0].Key == stays.Key, "adopted %v", got)
	stop()
}
