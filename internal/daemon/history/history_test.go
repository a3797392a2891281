package history

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(dir string) *History { return Open(dir, nil, zap.NewNop()) }

const target = "/var/lib/kubelet/pods/0f0e/volumes/kubernetes.io~csi/pvc-1/mount"

// told is a history in words, the oldest first.
func told(h *History, name string) string {
	var out []string
	all, _ := h.of(func(e *adminv1.VolumeEvent) bool { return name == "" || nameOf(e) == name })
	for _, e := range all {
		out = append(out, fmt.Sprintf("%d %s %s: %s", e.GetCount(), e.GetWhat(), e.GetBy(), e.GetText()))
	}
	return strings.Join(out, "\n")
}

func want(t *testing.T, h *History, name, want string) {
	t.Helper()
	check.Equal(t, told(h, name), want, "what is told of %q", name)
}

// TestLifeOfAVolume: what calls and refusals add, and that a restart keeps it.
func TestLifeOfAVolume(t *testing.T) {
	dir := t.TempDir()
	h := open(dir)
	call := func(method, failure string, is telemetry.Call) {
		is.Driver, is.CSIVolume, is.Pod = "ebs", "vol-1", "shop/db-0"
		h.Call(t.Context(), method, &is, failure)
	}
	refused := &refusal.Refusal{
		Key: "abcdef0123", Target: target, Driver: "ebs", VolumeID: "vol-1", Party: refusal.PartyPolicy, PodNamespace: "shop", PodName: "db-0",
		Error: "volume " + target + " of pod shop/db-0: it must not",
	}
	other := *refused
	other.Error = "volume x: the device is busy: wait"
	for range 3 {
		h.Refused(refused)
		h.Refused(&other)
	}
	const node = "/csi.v1.Node/"
	call(node+"NodeStageVolume", "", telemetry.Call{Handler: "kata", Rule: `rule "disks"`, Target: "/staging"})
	call(node+"NodeStageVolume", "", telemetry.Call{Handler: "kata", Repeated: true})
	call(node+"NodePublishVolume", "refused", telemetry.Call{Volume: "abcdef0123"}) // Refused reports it
	call(node+"NodePublishVolume", "", telemetry.Call{Volume: "abcdef0123", Target: target, Handler: "kata"})
	v := &volume.Volume{Key: "abcdef0123", Target: target, Driver: "ebs", Origin: &volume.Origin{VolumeID: "vol-1"}}
	for _, binding := range []runtime.Binding{{Sandbox: "sb-1", Runtime: "kata-go"}, {Sandbox: "sb-1", Runtime: "kata-go"}, {}, {}} {
		h.Bound(v, binding)
	}
	call(node+"NodeGetVolumeStats", "", telemetry.Call{Volume: "abcdef0123"})
	call(node+"NodeExpandVolume", "", telemetry.Call{Volume: "abcdef0123", Detail: "to 9 bytes"})
	call(node+"NodeUnstageVolume", "the driver answered Internal", telemetry.Call{})
	call(node+"NodeUnstageVolume", "", telemetry.Call{})
	all := `3 refused kubelet: (policy) it must not
3 refused kubelet: (policy) the device is busy: wait
1 staged kubelet: for kata, by rule "disks"
1 published kubelet: for kata
1 bound sandbox: sb-1 kata-go
1 unbound sandbox: 
1 grown kubelet: to 9 bytes
1 unstage failed kubelet: the driver answered Internal
1 unstaged kubelet: `
	want(t, h, "", all)
	// What was not deferred has no history.
	h.Call(t.Context(), csi.Node_NodeUnpublishVolume_FullMethodName, &telemetry.Call{Driver: "ebs", CSIVolume: "vol-2", Target: "/other"}, "")
	h.Call(t.Context(), csi.Node_NodeStageVolume_FullMethodName, &telemetry.Call{Driver: "ebs", CSIVolume: "vol-2"}, "the driver answered Internal")
	h.Call(t.Context(), csi.Node_NodePublishVolume_FullMethodName, &telemetry.Call{Driver: "ebs", CSIVolume: "vol-2", Rule: "no rule"}, "")
	h.Close()
	h = open(dir)
	defer h.Close()
	want(t, h, "ebs/vol-1", all)
	got := h.List(nil, 2)
	check.That(t, len(got) == 2 && got[0].GetWhat() == "unstaged" && got[1].GetWhat() == "unstage failed", "the newest are %v", got)
	host := &telemetry.Call{Driver: "ebs", CSIVolume: "vol-2", Target: "/other", Rule: `rule "sub-paths"`}
	h.Call(t.Context(), csi.Node_NodePublishVolume_FullMethodName, host, "")
	h.Call(t.Context(), csi.Node_NodePublishVolume_FullMethodName, &telemetry.Call{Driver: "ebs", CSIVolume: "vol-2", Repeated: true}, "")
	want(t, h, "ebs/vol-2", `1 published kubelet: not deferred, by rule "sub-paths"`)
	h.mu.Lock() // the writer reads it
	delete(h.volumes, "ebs/vol-2")
	h.mu.Unlock()
	h.Bound(v, runtime.Binding{}) // as before
	h.Did(v, Repaired, "reconcile", "end removal", volume.Errorf(volume.Busy, "still open"))
	want(t, h, "", all+"\n1 repair failed reconcile: end removal: still open")
}

// TestBounds: a volume that is busy forgets its own events first, and the node its oldest.
func TestBounds(t *testing.T) {
	dir := t.TempDir()
	h := open(dir)
	for i := range 2 * mostPerVolume {
		h.Add(&adminv1.VolumeEvent{Id: "busy", What: "refused", Failed: true, Text: fmt.Sprint(i, strings.Repeat("é", 2*mostText))})
	}
	busy, _ := h.of(nil)
	check.That(t, len(busy) == mostPerVolume && strings.HasPrefix(busy[0].GetText(), fmt.Sprint(mostPerVolume)) && len(busy[0].GetText()) <= mostText+3,
		"%d events, the first is %v", len(busy), busy[0])
	for i := range mostEvents {
		h.Add(&adminv1.VolumeEvent{Id: fmt.Sprintf("volume-%d", i), What: "published"})
	}
	h.Close()
	got, _ := h.of(nil)
	check.That(t, len(got) == mostEvents && got[0].GetId() != "busy", "%d events, the oldest is of %s", len(got), got[0].GetId())
	h.Add(&adminv1.VolumeEvent{Id: "ancient", What: "published"})
	h.volumes["ancient"][0].LastAt = timestamppb.New(time.Now().Add(-mostAge - time.Second))
	want(t, h, "ancient", "")
	info := check.Value(os.Stat(filepath.Join(dir, "events.pb")))(t)
	check.That(t, info.Mode().Perm() == 0o600, "the file's mode is %v", info.Mode())
}

// TestRefusalsGoFirst: whoever makes many volumes that are refused pushes nothing else out, and a restart finds what
// each sandbox has.
func TestRefusalsGoFirst(t *testing.T) {
	const many = 4000
	dir := t.TempDir()
	h := open(dir)
	v := func(i int) *volume.Volume {
		return &volume.Volume{Key: volume.Key(fmt.Sprint("key-", i)), Driver: "ebs", Origin: &volume.Origin{VolumeID: fmt.Sprint("vol-", i)}}
	}
	h.Add(&adminv1.VolumeEvent{Id: "lost", What: released, Text: "by force"})
	for i := range many {
		h.Bound(v(i), runtime.Binding{Sandbox: "sb"})
		h.Did(v(i), Ended, "hand", "more", nil)
	}
	for i := range 2 * mostPerVolume {
		h.Did(v(0), Repaired, "reconcile", fmt.Sprint(i), nil)
	}
	for i := range mostEvents {
		h.Add(&adminv1.VolumeEvent{Id: fmt.Sprint("tenant-", i), What: Refused, Failed: true})
	}
	h.Close()
	h = open(dir)
	defer h.Close()
	want(t, h, "lost", "1 released : by force")
	before := len(h.List(nil, 2*mostEvents))
	for i := range many {
		h.Bound(v(i), runtime.Binding{Sandbox: "sb"})
	}
	after := len(h.List(nil, 2*mostEvents))
	check.That(t, before == mostEvents && after == before, "%d events, and %d after the restart", before, after)
	for i := range mostEvents { // others than refusals push out others, but not who has a volume
		h.Add(&adminv1.VolumeEvent{Id: fmt.Sprint("other-", i), What: published})
	}
	all := h.prune()
	check.That(t, len(all) == mostEvents && all[0].GetId() == "lost" && all[many].GetWhat() == bound,
		"%d events, the first are %v, %v", len(all), all[0], all[many])
}

// TestWhoHasAVolumeIsNeverTooOld: a restart finds the sandbox again, and it looked new. What ended is forgotten.
func TestWhoHasAVolumeIsNeverTooOld(t *testing.T) {
	dir := t.TempDir()
	h := open(dir)
	of := &volume.Origin{VolumeID: "vol-1"}
	lives, left := &volume.Volume{Key: "lives", Target: "/a", Driver: "ebs", Origin: of}, &volume.Volume{Key: "left", Target: "/b", Driver: "ebs", Origin: of}
	for _, v := range []*volume.Volume{lives, left} {
		h.Did(v, Repaired, "reconcile", "mount guard", nil)
		h.Bound(v, runtime.Binding{Sandbox: "sb-1"})
	}
	h.Add(&adminv1.VolumeEvent{What: unpublished, TargetPath: "/b", Driver: "ebs", VolumeId: "vol-1"})
	h.Close()
	old, _ := h.of(nil)
	for _, e := range old {
		e.LastAt = timestamppb.New(time.Now().Add(-mostAge - time.Second))
	}
	check.Must(t, h.writeFile(old))
	h = open(dir)
	defer h.Close()
	h.Bound(lives, runtime.Binding{Sandbox: "sb-1"})
	want(t, h, "", "1 bound sandbox: sb-1")
	check.That(t, h.latest(old[0], nil).GetNumber() == old[1].GetNumber(), "bound again")
}

// TestRepairsThatRepeat are counted, and what a volume went through before stays.
func TestRepairsThatRepeat(t *testing.T) {
	h := open(t.TempDir())
	defer h.Close()
	v := &volume.Volume{Key: "key"}
	h.Add(&adminv1.VolumeEvent{Id: "key", What: published})
	for range mostPerVolume {
		h.Did(v, Repaired, "reconcile", "claim device", nil)
		h.Did(v, Repaired, "reconcile", "mount guard", nil)
	}
	h.Did(v, Repaired, "reconcile", "mount guard", volume.Errorf(volume.Busy, "open"))
	h.Did(v, Repaired, "reconcile", "mount guard", nil)
	want(t, h, "", `1 published : 
50 repaired reconcile: claim device
50 repaired reconcile: mount guard
1 repair failed reconcile: mount guard: open
1 repaired reconcile: mount guard`)
}

// TestWritesAreTriedAgain: without another event, when there is space again. The pause after a slow write begins with its
// end, also if it failed: an event that comes later does not wait for it.
func TestWritesAreTriedAgain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.pb")
	check.Must(t, os.Mkdir(file+".new", 0o700))
	h := open(filepath.Dir(file))
	defer h.Close()
	slow := func() { // the event's write takes at least the time pause, and the pause after it is 19 times as long
		h.Add(&adminv1.VolumeEvent{Id: "volume-1", What: published})
		h.mu.Lock()
		time.Sleep(2 * pause)
		h.mu.Unlock()
	}
	written := func() bool { return check.Err(os.Stat(file)) == nil }
	slow()
	time.Sleep(2 * pause) // it has failed by then; if it has not, the test passes all the same
	check.Must(t, os.Remove(file+".new"))
	time.Sleep(13 * pause)
	check.That(t, !written(), "a slow write was tried again too soon")
	check.Eventually(t, "the file is written", written)
	slow()
	time.Sleep(25 * pause)
	check.Must(t, os.Remove(file))
	h.Add(&adminv1.VolumeEvent{Id: "volume-1", What: published})
	time.Sleep(10 * pause)
	check.That(t, written(), "an event waits for a pause that is over")
}

// TestFileThatCannotBeUsed: what cannot be read or written costs no event of this process, and no call.
func TestFileThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "events.pb")
	check.Must(t, os.WriteFile(file, []byte("damaged"), 0o600))
	check.Must(t, os.Truncate(file, mostBytes+1))
	check.Fails(t, check.Err(readFile(file)), "at most")
	check.Must(t, os.Truncate(file, 7))
	h := open(dir)
	h.Add(&adminv1.VolumeEvent{Id: "volume-1", What: "published", TargetPath: "/not\xffutf8"})
	h.Close()
	h = open(dir)
	check.Must(t, os.RemoveAll(dir))
	h.Add(&adminv1.VolumeEvent{Id: "volume-2", What: "published"})
	want(t, h, "", "1 published : \n1 published : ")
	h.Close()
}
