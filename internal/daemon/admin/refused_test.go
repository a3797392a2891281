package admin

import (
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// fakeRefusals holds what a test refused.
type fakeRefusals struct {
	mu  sync.Mutex
	all []refusal.Refusal
}

func (f *fakeRefusals) Refused() []refusal.Refusal {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]refusal.Refusal(nil), f.all...)
}

func (f *fakeRefusals) Refusal(key volume.Key) (refusal.Refusal, bool) {
	for _, one := range f.Refused() {
		if one.Key == key {
			return one, true
		}
	}
	return refusal.Refusal{}, false
}

func (f *fakeRefusals) set(all ...refusal.Refusal) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = all
}

func refusalAt(target string) refusal.Refusal {
	return refusal.Refusal{
		Key: volume.KeyOf(target), Target: target, Driver: "d", VolumeID: "vol-9", FSType: "xfs", AccessMode: "SINGLE_NODE_WRITER",
		PodUID: "u9", PodNamespace: "ns", PodName: "db-0", Rule: `rule "disks"`, Handler: "kata", Party: refusal.PartyHandler,
		Error: "volume " + target + ": no subPath", First: time.Unix(100, 0), Last: time.Unix(200, 0), Count: 7,
	}
}

func TestRefusedVolumesAreShown(t *testing.T) {
	s := serve(t, "a", "z")
	refusals := &fakeRefusals{}
	s.node.Refusals = refusals
	target := s.kubelet + "/pods/m/mount"
	again := refusalAt(s.handler.volumes[0].Target) // a repeated publish of a volume that is there
	again.Party = refusal.PartyDriver
	refusals.set(again, refusalAt(target))

	list, err := s.admin().ListVolumes(t.Context(), &adminv1.ListVolumesRequest{})
	check.Require(t, err == nil && len(list.GetVolumes()) == 3, "%v, %v", list, err)
	first, got := list.GetVolumes()[0], list.GetVolumes()[1]
	check.That(t, first.GetState() == adminv1.VolumeState_VOLUME_STATE_ADOPTED && first.GetRefusedBy() == "driver" && strings.Contains(first.GetLastError(), "subPath"),
		"the one that is there: %v", first)
	check.That(t, got.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED && got.GetTargetPath() == target && got.GetRefusedBy() == "handler" &&
		got.GetRule() == `rule "disks"` && got.GetHandler() == "kata" && got.GetPodNamespace() == "ns" && got.GetPodName() == "db-0" &&
		got.GetPodUid() == "u9" && got.GetRefusals() == 7 && got.GetVolumeId() == "vol-9" && got.GetCreatedAt().GetSeconds() == 100 &&
		got.GetLastErrorAt().GetSeconds() == 200 && got.GetDeviceId() == "" && got.GetSandbox() == nil, "listed: %v", got)
	for want, req := range map[int]*adminv1.ListVolumesRequest{
		1: {State: adminv1.VolumeState_VOLUME_STATE_REFUSED}, 2: {State: adminv1.VolumeState_VOLUME_STATE_ADOPTED}, 3: {Handler: "kata"}, 0: {Driver: "other"},
	} {
		list, err = s.admin().ListVolumes(t.Context(), req)
		check.That(t, err == nil && len(list.GetVolumes()) == want, "%v: %v, %v", req, list, err)
	}
	for _, ref := range []string{target, got.GetId(), got.GetId()[:8]} {
		one, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: ref})
		check.That(t, err == nil && one.GetVolume().GetRefusals() == 7, "%s: %v, %v", ref, one, err)
		_, err = s.admin().GetVolumeStats(t.Context(), &adminv1.GetVolumeStatsRequest{Volume: ref})
		check.That(t, status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "no subPath"), "stats of %s: %v", ref, err)
	}
	node, err := s.admin().GetNode(t.Context(), &adminv1.GetNodeRequest{})
	check.That(t, err == nil && node.GetVolumesByState()["refused"] == 1 && node.GetVolumesByState()["adopted"] == 2,
		"%v, %v", node.GetVolumesByState(), err)
	_, err = runtimev1.NewRuntimeClient(s.conn).RuntimeGetVolumeStats(t.Context(), &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: target})
	check.That(t, status.Code(err) == codes.NotFound, "the Runtime API knows a refused volume: %v", err)
}

func TestWatchTellsOfRefusals(t *testing.T) {
	s := serve(t)
	refusals := &fakeRefusals{}
	s.node.Refusals = refusals
	target := s.kubelet + "/pods/m/mount"
	refusals.set(refusalAt(target))
	_, next := s.watch(t, &adminv1.WatchVolumesRequest{Handler: "kata"})
	e := next()
	check.That(t, e.GetVolume().GetRefusedBy() == "handler", "listed: %v", e)
	e = next()
	check.That(t, e.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED, "got %v", e)
	more := refusalAt(target)
	more.Party = refusal.PartyPolicy
	refusals.set(more)
	s.hub.Changed(more.Key)
	e = next()
	check.That(t, e.GetVolume().GetRefusedBy() == "policy" && e.GetVolume().GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED, "changed: %v", e)
	other := more
	other.Handler = "crust" // it is none of those that are watched any more
	refusals.set(other)
	s.hub.Changed(more.Key)
	e = next()
	check.That(t, e.GetType() == adminv1.WatchVolumesResponse_TYPE_REMOVED && e.GetVolume().GetTargetPath() == target, "of another handler: %v", e)
	refusals.set(more)
	s.hub.Changed(more.Key)
	e = next()
	check.That(t, e.GetType() == adminv1.WatchVolumesResponse_TYPE_CHANGED, "back: %v", e)
	refusals.set()
	s.hub.Changed(more.Key)
	e = next()
	check.That(t, e.GetType() == adminv1.WatchVolumesResponse_TYPE_REMOVED && e.GetVolume().GetTargetPath() == target, "gone: %v", e)
}

// TestVolumesThatAreNotThere: the caller is told, and nothing else happens.
func TestVolumesThatAreNotThere(t *testing.T) {
	s := serve(t, "a")
	for _, ref := range []string{s.kubelet + "/nowhere", "abcdef", "x"} {
		for call, err := range map[string]error{
			"stats":  check.Err(s.admin().GetVolumeStats(t.Context(), &adminv1.GetVolumeStatsRequest{Volume: ref})),
			"expand": check.Err(s.admin().ExpandVolume(t.Context(), &adminv1.ExpandVolumeRequest{Volume: ref, RequiredBytes: 1})),
			"freeze": check.Err(s.admin().FreezeVolume(t.Context(), &adminv1.FreezeVolumeRequest{Volume: ref})),
			"thaw":   check.Err(s.admin().ThawVolume(t.Context(), &adminv1.ThawVolumeRequest{Volume: ref})),
		} {
			check.That(t, status.Code(err) == codes.NotFound, "%s %s: %v", call, ref, err)
		}
	}
}

// TestTheNameOfACall is the one of CSI calls, so that a volume has one history.
func TestTheNameOfACall(t *testing.T) {
	call, id := &telemetry.Call{}, strings.Repeat("v", 300)
	note(call, &volume.Volume{Origin: &volume.Origin{VolumeID: id}})
	check.That(t, call.CSIVolume == refusal.Clip(id), "got %q", call.CSIVolume)
}
