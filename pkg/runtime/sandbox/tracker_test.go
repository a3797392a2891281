package sandbox

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// settle waits until the first listing has been repeated.
func settle() { time.Sleep(2 * settleTime) }

func TestListsAndFollows(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.put("sb-1", "pod-1")
		f.contain("c-1", "sb-1")
		tracker, told := ready(t, f)
		pod, known := tracker.PodOf("sb-1")
		check.That(t, known && pod == "pod-1" && has(tracker, "pod-1", "sb-1")(), "sb-1 is of %q, %v; pod-1 has %q", pod, known, tracker.OfPod("pod-1"))
		_, known = tracker.PodOf("c-1")
		check.That(t, !known, "a container is taken for a sandbox")
		f.put("sb-2", "pod-1")
		check.Eventually(t, "sb-2, the newest first", has(tracker, "pod-1", "sb-2", "sb-1"))
		f.end("sb-1")
		check.Eventually(t, "sb-1 gone", has(tracker, "pod-1", "sb-2"))
		check.Eventually(t, "told", func() bool { return told.has("added pod-1 sb-2") && told.has("gone sb-1") })
		f.drop("sb-2")
		f.stop()
		f.start()
		check.Eventually(t, "what went unseen is missed", func() bool { return told.has("gone sb-2") })
	})
}

func TestWhatWasMissedWhileBlindIsFound(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.put("old", "pod-1")
		f.put("stays", "pod-2")
		tracker, told := ready(t, f)
		f.stop()
		check.Eventually(t, "not ready", func() bool { return !tracker.Ready() && tracker.LastError() != nil })
		check.That(t, has(tracker, "pod-1", "old")(), "what was known is forgotten with the runtime's restart")
		f.drop("old")
		f.put("new", "pod-1")
		f.start()
		check.Eventually(t, "new", has(tracker, "pod-1", "new"))
		check.That(t, told.has("gone old") && told.has("added pod-1 new") && !told.has("gone stays"), "told: %q", told.lines)
		settle()
		f.put("later", "pod-3")
		check.Eventually(t, "it is followed again", has(tracker, "pod-3", "later"))
	})
}

func TestRuntimeThatComesLater(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		tracker, _ := track(t, f, Config{})
		check.Eventually(t, "a cause", func() bool { return strings.Contains(tracker.LastError().Error(), "no such socket") })
		_, err := tracker.Destinations(t.Context(), "sb-1", "/v")
		check.That(t, volume.KindOf(err) == volume.NoSandbox && strings.Contains(err.Error(), "/run/fake.sock") && strings.Contains(err.Error(), "sb-1"),
			"got %v", err)
		_, _, err = tracker.Mounting(t.Context(), "/v")
		check.That(t, volume.KindOf(err) == volume.NoSandbox, "got %v", err)
		f.put("sb-1", "pod-1")
		f.start()
		check.Eventually(t, "sb-1", has(tracker, "pod-1", "sb-1"))
	})
}

// A container runtime that has just started may answer before it has read its own
// state: an empty list is believed when it is given twice.
func TestAnEmptyFirstAnswerIsDoubted(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.start()
		tracker, told := track(t, f, Config{})
		check.Eventually(t, "ready", tracker.Ready)
		check.Equal(t, f.lists.Load(), 2, "listings until it is ready")
		restart := func() (before int32) {
			f.stop()
			check.Eventually(t, "not ready", func() bool { return !tracker.Ready() })
			before = f.lists.Load()
			f.start()
			check.Eventually(t, "ready", tracker.Ready)
			return before
		}
		f.put("sb-1", "pod-1")
		before := restart()
		check.That(t, f.lists.Load() == before+1, "an answer that is not empty is not believed at once")
		f.drop("sb-1")
		before = restart()
		check.That(t, f.lists.Load() == before+2 && told.has("gone sb-1"), "%d listings, told: %q", f.lists.Load()-before, told.lines)
	})
}

func TestDestinations(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		// Kubelet's directory is a symbolic link.
		dir := check.Value(filepath.EvalSymlinks(t.TempDir()))(t)
		const below = "/pods/pod-1/volumes/v/mount"
		source := dir + "/real" + below
		check.Must(t, os.MkdirAll(source, 0o700))
		check.Must(t, os.Symlink("real", dir+"/link"))
		f.put("sb-1", "pod-1")
		f.put("sb-9", "pod-1")
		f.contain("c-1", "sb-1", mount{source, "/data"}, mount{"/other", "/other"})
		f.contain("c-2", "sb-1", mount{dir + "/link" + below, "/linked"}, mount{source, "/data"})
		f.contain("c-3", "sb-1", mount{dir + "/missing" + below, "/missing"})
		f.contain("c-4", "sb-9", mount{source, "/of-another-sandbox"})
		f.contain("../c-5", "sb-1", mount{source, "/odd"})
		f.contain("c-6", "sb-1", mount{source, "/vanished"})
		f.vanished["c-6"] = true
		wantIDs, want := []string{"c-1", "c-2", "c-3", "c-6", "sb-1"}, []string{"/data", "/linked"}
		tracker, _ := ready(t, f)
		got, err := tracker.Destinations(t.Context(), "sb-1", source)
		slices.Sort(got)
		check.That(t, err == nil && slices.Equal(got, want), "%q, %v", got, err)
		ids, err := tracker.ContainerIDs(t.Context(), "sb-1")
		slices.Sort(ids)
		check.That(t, err == nil && slices.Equal(ids, wantIDs), "%q, %v", ids, err)
		check.Kind(t, check.Err(tracker.Destinations(t.Context(), "unknown", "/v")), volume.NoSandbox) // an unknown sandbox
		check.Kind(t, check.Err(tracker.ContainerIDs(t.Context(), "unknown")), volume.NoSandbox)       // an unknown sandbox
	})
}

func wantMounting(t *testing.T, tracker *Tracker, path string, want ...string) {
	t.Helper()
	got, unread, err := tracker.Mounting(t.Context(), "/another", path)
	slices.Sort(got)
	check.That(t, err == nil && len(unread) == 0 && slices.Equal(got, want), "%s is mounted by %q, %v, want %q", path, got, err, want)
}

func TestMounting(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.put("sb-1", "pod-1")
		f.put("dead", "pod-2")
		f.contain("c-1", "sb-1", mount{"/v/", "/data"})
		f.contain("c-2", "sb-1", mount{"/w", "/data"})
		f.contain("c-3", "dead", mount{"/v", "/data"})
		f.contain("c-5", "dead", mount{"/x", "/data"})
		f.containers["c-3"].State, f.containers["c-5"].State = runtimeapi.ContainerState_CONTAINER_EXITED, runtimeapi.ContainerState_CONTAINER_UNKNOWN
		tracker, _ := ready(t, f)
		f.end("dead")
		check.Eventually(t, "gone", has(tracker, "pod-2"))
		wantMounting(t, tracker, "/v", "sb-1")
		wantMounting(t, tracker, "/nobody")
		wantMounting(t, tracker, "/x", "dead") // a container outlives its sandbox's process
		f.put("sb-3", "")                      // newer than the last listing, and not kubelet's
		f.contain("c-4", "sb-3", mount{"/v", "/data"})
		wantMounting(t, tracker, "/v", "sb-1", "sb-3")
	})
}

// TestMountingBesideOneThatCannotBeRead: other sandboxes are found, and of the one only that it is not known.
func TestMountingBesideOneThatCannotBeRead(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		for i := range 5 {
			bad := fmt.Sprintf("bad-%d", i)
			f.put(bad, "pod-1")
			f.contain("c-"+bad, bad, mount{"/v", "/data"})
			f.unreadable["c-"+bad] = i > 0 // and hangs
		}
		f.put("sb-1", "pod-2")
		f.contain("c-1", "sb-1", mount{"/v", "/data"})
		tracker, _ := ready(t, f)
		for path, want := range map[string][]string{"/v": {"sb-1"}, "/nobody": nil} {
			begin := time.Now()
			got, unread, err := tracker.Mounting(t.Context(), path)
			check.That(t, err == nil && slices.Equal(got, want) && len(unread) == 5 && unread["bad-0"] != nil, "%s: %q, %v, %v", path, got, unread, err)
			check.That(t, time.Since(begin) <= 5*statusTime, "it took %v", time.Since(begin))
		}
	})
}

// TestMountingEnds though its caller would wait for ever, as reconcile does.
func TestMountingEnds(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.put("sb-1", "pod-1")
		tracker, _ := ready(t, f)
		defer f.block()()
		_, _, err := tracker.Mounting(t.Context(), "/v")
		kind := volume.KindOf(err)
		check.That(t, kind == volume.Timeout || kind == volume.NoSandbox, "got %v", err) // the next listing may end first
	})
}

func TestHostileSandboxesAreIgnored(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.put("../../etc", "pod-1")
		f.put("sb-odd", "pod/../1")
		f.put("sb-empty", "")
		f.put(strings.Repeat("x", 200), "pod-1")
		f.put("sb-1", "pod-1")
		core, logs := observer.New(zap.WarnLevel)
		f.log = zap.New(core)
		tracker, _ := ready(t, f)
		f.put("../../usr", "pod-1")
		f.put("sb-other", "pod/../1")
		f.put("sb-2", "pod-1")
		check.Eventually(t, "sb-2", has(tracker, "pod-1", "sb-2", "sb-1"))
		got := slices.Sorted(maps.Keys(tracker.known))
		check.That(t, slices.Equal(got, []string{"sb-1", "sb-2"}), "known are %q", got)
		check.Equal(t, logs.Len(), 6, "lines, one for each that is ignored")
	})
}

// Lookups are from memory: a runtime that hangs delays only who asks it.
func TestHungRuntimeBlocksNoLookup(t *testing.T) {
	onBoth(t, func(t *testing.T, f *fakeRuntime) {
		f.put("sb-1", "pod-1")
		f.contain("c-1", "sb-1", mount{"/v", "/data"})
		tracker, _ := ready(t, f)
		defer f.block()()
		f.put("sb-2", "pod-2") // asked about, without an answer
		start := time.Now()
		_, known := tracker.PodOf("sb-1")
		check.That(t, known && has(tracker, "pod-1", "sb-1")() && time.Since(start) <= 0, "lookups: %v, after %v", known, time.Since(start))
		check.Kind(t, check.Err(tracker.Destinations(check.Within(t, 50*time.Millisecond), "sb-1", "/v")), volume.Timeout)
		gone, cancelGone := context.WithCancel(t.Context())
		cancelGone()
		check.Kind(t, check.Err(tracker.ContainerIDs(gone, "sb-1")), volume.Canceled) // a caller who went away
	})
}

// TestOldContainerdIsRefused until it is upgraded. Who asks which sandboxes have a volume is told what to do.
func TestOldContainerdIsRefused(t *testing.T) {
	onCRIO(t, func(t *testing.T, f *fakeRuntime) {
		run := func(version string) {
			f.name, f.version = "containerd", version
			f.start()
		}
		run("v1.7.35")
		tracker, _ := track(t, f, Config{})
		const want = "containerd 1.7.35 is not supported: upgrade to 2.0 or newer"
		check.Eventually(t, "refused", func() bool { return tracker.LastError().Error() == want })
		_, _, err := tracker.Mounting(t.Context(), "/v")
		check.That(t, volume.KindOf(err) == volume.NoSandbox && strings.Contains(err.Error(), want), "%v", err)
		f.stop()
		run("v2.0.0-rc.1")
		check.Eventually(t, "followed", tracker.Ready)
	})
	for version, refused := range map[string]bool{"1.6.20~ds1": true, "2.4.1+unknown": false, "10.0.0": false, "devel": false} {
		err := checkSupported(version)
		check.That(t, (err != nil) == refused, "%q: %v", version, err)
	}
}

// TestRuntimeWithoutCRI is containerd as some packages configure it.
func TestRuntimeWithoutCRI(t *testing.T) {
	onCRIO(t, func(t *testing.T, f *fakeRuntime) {
		f.off = true
		f.start()
		tracker, _ := track(t, f, Config{})
		check.Eventually(t, "why", func() bool { return strings.Contains(tracker.LastError().Error(), "disabled_plugins") })
	})
}

func TestErrorsOfCallsAreInPlainWords(t *testing.T) {
	answer := status.Error(codes.Unavailable, "no such socket")
	for _, c := range []struct {
		err  error
		want string
	}{
		{answer, "no such socket"},
		{fmt.Errorf("events: %w", answer), "events: no such socket"},
		{io.EOF, "EOF"},
	} {
		got := plain(c.err)
		check.That(t, got.Error() == c.want, "%v is told as %q", c.err, got)
	}
}
