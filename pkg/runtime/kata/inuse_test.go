package kata

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

var errAway = errors.New("containerd is away")

// wantUse wants a volume to be in use by a sandbox, or by none.
func wantUse(t *testing.T, b *bench, v *volume.Volume, want string) {
	t.Helper()
	id, err := b.h.InUse(t.Context(), v)
	check.That(t, id == want && err == nil, "in use by %q, %v, want %q", id, err, want)
}

// wantUnknown wants the answer that it is not known, with the words.
func wantUnknown(t *testing.T, b *bench, v *volume.Volume, words ...string) {
	t.Helper()
	handlers.WantError(t, check.Err(b.h.InUse(t.Context(), v)), volume.Busy, v, append(words, "not known")...)
}

// noteFiles lists what is on record of all volumes' sandboxes.
func noteFiles(t *testing.T, b *bench) []string {
	t.Helper()
	return check.Value(filepath.Glob(filepath.Join(b.cfg.StateDir, "*")))(t)
}

// A container runtime that cannot be asked does not mean that no sandbox has a
// volume, also after a restart with empty hands.
func TestRuntimeAwayIsUnknown(t *testing.T) {
	b, v := publishedBench(t, kataemu.Rust)
	shim := b.startShim(t, v, "sb1")
	wantUse(t, b, v, "sb1")
	b.setAway(errAway)
	b.pods = map[string][]string{} // a new process has heard of none
	b.Restart(t)
	wantUse(t, b, v, "sb1")
	shim.Kill(t)
	wantUse(t, b, v, "") // nobody listens any more, nor does any other sandbox live
}

// TestMemoryIsOlderThanTheEnd: a release asks the runtime itself about a sandbox that was listed, and
// without an answer that lives.
func TestMemoryIsOlderThanTheEnd(t *testing.T) {
	b, v := publishedBench(t, kataemu.Rust)
	shim := b.startShim(t, v, "sb1")
	shim.Kill(t)
	b.add(v.PodUID, "sb1") // in memory it is still there
	wantUse(t, b, v, "sb1")
	b.ended, b.unasked = map[string]bool{"sb1": true}, errAway
	wantUse(t, b, v, "sb1")
	b.unasked = nil
	wantUse(t, b, v, "")
}

// A sandbox that came while nobody looked left no trace that leads to the volume.
func TestUnseenSandboxIsUnknown(t *testing.T) {
	b := newBench(t, kataemu.Rust)
	v, other := published(t, b, "a"), published(t, b, "other")
	b.setAway(errAway)
	shim := check.Value(kataemu.Start(kataemu.Options{Flavor: kataemu.Rust, SandboxID: "unseen", Sandboxes: b.cfg.RustSandboxes}))(t)
	t.Cleanup(func() { _ = shim.Stop() })
	wantUnknown(t, b, v, "unseen", "containerd is away", "containerd.socket")
	b.add(other.PodUID, "unseen") // of another pod, as was known before
	wantUse(t, b, v, "")
	wantUse(t, b, other, "unseen")
	b.setAway(nil)
	b.remove("unseen")
	wantUse(t, b, v, "") // it is followed, and lists none of the pod
}

// wantForgotten wants a volume of a sandbox that only its shim knows of.
func wantForgotten(t *testing.T, b *bench, v *volume.Volume, id string) {
	t.Helper()
	_, err := b.h.InUse(t.Context(), v)
	of, is := errors.AsType[*deferral.ForgottenError](err)
	check.That(t, is && slices.Equal(of.Sandboxes, []string{id}) && volume.KindOf(err) == volume.Busy,
		"in use: %v, want the forgotten sandbox %s", err, id)
}

// A shim that died is no proof while the container runtime still lists its sandbox. A list without it
// while the shim answers is none by itself, and is asked for twice.
func TestBothWordsAreNeeded(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b, v := publishedBench(t, flavor)
		shim := b.startShim(t, v, "sb1")
		b.remove("sb1")
		wantForgotten(t, b, v, "sb1")
		check.Must(t, b.h.Tracking().Withdraw(t.Context(), v))
		wantForgotten(t, b, v, "sb1") // what is known of it stays
		check.Must(t, b.h.Tracking().Disowned(t.Context(), v, []string{"sb1"}))
		b.publish(t, v)
		b.add(v.PodUID, "sb1")
		handlers.WantError(t, b.h.Tracking().Disowned(t.Context(), v, []string{"sb1"}), volume.Busy, v, "sb1", "crictl stopp")
		b.setAway(errAway)
		handlers.WantError(t, b.h.Tracking().Disowned(t.Context(), v, []string{"sb1"}), volume.Busy, v, "sb1", "containerd is away")
		b.setAway(nil)
		check.Must(t, shim.Shim.Kill())
		wantUse(t, b, v, "sb1")
		b.remove("sb1")
		wantUse(t, b, v, "")
	}
}

// What is not a socket that refuses is not proof of a dead shim.
func TestSocketThatCannotBeTriedIsUnknown(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	b.startShim(t, v, "sb1")
	wantUse(t, b, v, "sb1")
	b.remove("sb1")
	dir := filepath.Join(b.cfg.GoSandboxes, "sb1")
	check.Must(t, os.RemoveAll(dir))
	check.Must(t, os.Symlink("sb1", dir)) // ELOOP
	wantUnknown(t, b, v, "sb1")
}

// The ids in the volume's directory are all there is where no container runtime is
// followed, and count beside one: a directory that cannot be read proves nothing.
func TestDirectoryThatCannotBeReadIsUnknown(t *testing.T) {
	b := newBench(t, kataemu.Go)
	b.stop() // its watch reads what is set here
	v := published(t, b, "a")
	followed := b.h.bindings.sandboxes
	b.h.bindings.sandboxes = nil
	wantUse(t, b, v, "")
	shim := b.startShim(t, v, "sb1")
	wantUse(t, b, v, "sb1")
	shim.Kill(t)
	wantUse(t, b, v, "")
	check.Must(t, os.Rename(b.dir(v), b.dir(v)+".away"))
	wantUse(t, b, v, "") // no directory, no id
	check.Must(t, os.Symlink("loop", b.dir(v)))
	wantUnknown(t, b, v, "directory")
	b.h.bindings.sandboxes = followed // it may not list one whose shim still serves its socket
	wantUnknown(t, b, v, "directory")
}

// A target without the pod's UID, as a client of the Runtime API may choose one, is
// looked for among the mounts of all containers.
func TestMountSourceTellsTheSandbox(t *testing.T) {
	b := newBench(t, kataemu.Rust)
	v := b.Volume("a")
	v.PodUID = ""
	b.publish(t, v)
	wantUse(t, b, v, "")
	b.unread = map[string]error{"sb0": errors.New("its container cannot be read")}
	wantUse(t, b, v, "") // it has no files of Kata
	for _, root := range []string{b.cfg.GoSandboxes, b.cfg.RustSandboxes} {
		files := filepath.Join(root, "sb0")
		check.Must(t, os.MkdirAll(files, 0o700))
		wantUnknown(t, b, v, "sb0", "its container cannot be read")
		check.Must(t, os.Remove(files))
	}
	b.mounting = map[string]string{v.Target: "sb1"}
	b.err = errAway
	wantUnknown(t, b, v, "containerd is away")
	b.err = nil
	wantUse(t, b, v, "sb1")
	b.startShim(t, v, "sb1")
	check.That(t, len(noteFiles(t, b)) == 1, "the sandbox is not on record")
	b.mounting = nil // the container is gone, its sandbox lives
	wantUse(t, b, v, "sb1")
}

// What was seen once is known until the volume is retracted, whatever happens to
// the volume's directory, and over a restart.
func TestNotesSurvive(t *testing.T) {
	b := newBench(t, kataemu.Rust)
	watching(t, b)
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	b.pods = map[string][]string{}
	check.Must(t, os.RemoveAll(b.dir(v)))
	check.Eventually(t, "the directory is missed", func() bool { return !b.h.store.Watch.Has(v.Key) })
	wantForgotten(t, b, v, "sb1")
	b.publish(t, v)
	wantForgotten(t, b, v, "sb1")
	b.Restart(t)
	wantForgotten(t, b, v, "sb1")
	shim.Kill(t)
	wantUse(t, b, v, "")
	check.Must(t, b.h.Retract(t.Context(), v))
	check.Empty(t, noteFiles(t, b), "after Retract")
}

// Sandboxes that have ended stay on record while a VM may have outlived them, and not without bound.
func TestNotesDoNotGrow(t *testing.T) {
	b, v := publishedBench(t, kataemu.Rust)
	left := func(want ...string) {
		t.Helper()
		var got []string
		for _, file := range noteFiles(t, b) {
			got = append(got, strings.TrimPrefix(filepath.Ext(file), "."))
		}
		slices.Sort(got)
		check.Equal(t, strings.Join(got, " "), strings.Join(want, " "), "on record")
	}
	for i, id := range []string{"one", "three", "two"} {
		shim := b.startShim(t, v, id)
		wantUse(t, b, v, id)
		b.stats(t, v)
		check.Equal(t, b.h.Tracking().Several(v), i > 0, "several at %s", id)
		if id != "two" {
			shim.Kill(t)
		}
	}
	left("one", "three", "two")
	b.h.Tracking().ForgetEnded(v, func(id string) bool { return id == "one" })
	left("one", "two")
	check.That(t, b.h.Tracking().Several(v), "the sandbox whose VM may live is forgotten")
	notes := b.h.bindings.notes
	notes.add(v.Key, "again", b.h.bindings.ended)
	check.That(t, !b.h.Tracking().Several(v), "the last sandbox is not listed, and others are orphans beside it")
	b.h.bindings.notes = check.Value(openNotes(notes.dir, notes.log))(t)
	check.That(t, b.h.Tracking().Several(v), "after a restart any may be the last, whatever the clock was")
	b.h.Tracking().ForgetEnded(v, func(string) bool { return false })
	left("two")
	for i := range 2 * maxNoted {
		b.h.bindings.noteUse(v.Key, fmt.Sprint("never-started-", i))
	}
	n, last := len(noteFiles(t, b)), b.h.bindings.notes.of(v.Key)
	check.That(t, n <= maxNoted && last[len(last)-1] == fmt.Sprint("never-started-", 2*maxNoted-1), "%d are on record, the last is %v", n, last)
}

// The record of a volume that nobody knows is an orphan.
func TestNotesOfUnknownVolumes(t *testing.T) {
	b, v := publishedBench(t, kataemu.Rust)
	b.startShim(t, v, "sb1")
	wantUse(t, b, v, "sb1")
	both := check.Value(b.h.Orphans(func(volume.Key) bool { return false }))(t)
	check.That(t, len(both) == 1, "with a directory too, its volume is listed as %v", both)
	check.Must(t, os.RemoveAll(b.dir(v)))
	orphans, err := b.h.Orphans(func(volume.Key) bool { return false })
	check.Require(t, err == nil && len(orphans) == 1 && orphans[0].Key == v.Key, "orphans %v, %v", orphans, err)
	b.mounting = map[string]string{"": "tmpfs"} // a container's mount without a source
	b.remove("sb1")
	check.Must(t, os.RemoveAll(filepath.Join(b.cfg.RustSandboxes, "sb1")))
	wantUse(t, b, orphans[0], "")
	lost := *orphans[0]
	lost.Target = "(unknown target, id " + v.Key.Short() + ")" // as the broker names it without a record
	wantUse(t, b, &lost, "")
	err = b.h.Retract(t.Context(), orphans[0])
	check.That(t, err == nil && len(noteFiles(t, b)) == 0, "%v, left %q", err, noteFiles(t, b))
}

// A question that is under way while the volume is retracted tracks it once more. That is an orphan, and goes as one.
func TestQuestionThatOutlivesTheVolume(t *testing.T) {
	b, v := publishedBench(t, kataemu.Rust)
	check.Must(t, b.h.Retract(t.Context(), v))
	b.h.bindings.propose(v, shim{id: "sb1", flavor: rustShim})
	orphans, err := b.h.Orphans(func(volume.Key) bool { return false })
	check.Require(t, err == nil && len(orphans) == 1, "orphans %v, %v", orphans, err)
	err = b.h.Retract(t.Context(), orphans[0])
	check.That(t, err == nil && len(noteFiles(t, b)) == 0, "%v, left %q", err, noteFiles(t, b))
	_, tracked := b.h.store.Bindings.Get(v.Key)
	check.That(t, !tracked, "it is tracked for ever")
	foreign := b.Volume("foreign") // its program has removed it, and nobody would retract it
	foreign.Adopted = true
	b.h.bindings.propose(foreign, shim{id: "sb1", flavor: rustShim})
	check.That(t, len(b.h.Adopted()) == 0, "adopted: %v", b.h.Adopted())
}
