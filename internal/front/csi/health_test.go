package csi

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

func offers(reply *csi.NodeGetCapabilitiesResponse, kind csi.NodeServiceCapability_RPC_Type) bool {
	return slices.ContainsFunc(reply.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == kind })
}

// health asks as kubelet does, and gives "STATUS Reason" of the only entry, or "".
func (r *rig) health(pod string) (told, message string) {
	r.t.Helper()
	return r.askHealth(&csi.NodeGetVolumeHealthRequest{
		VolumeId: "vol-1", VolumePublishPath: r.target(pod), StagingTargetPath: r.staging(),
	})
}

func (r *rig) askHealth(req *csi.NodeGetVolumeHealthRequest) (told, message string) {
	r.t.Helper()
	reply, err := r.kubelet.NodeGetVolumeHealth(r.t.Context(), req)
	r.ok(nil, err)
	health := reply.GetVolumeHealth()
	if health.GetVolumeId() != req.GetVolumeId() || len(health.GetHealthStatuses()) > 1 {
		r.t.Errorf("got %v", reply)
	}
	for _, one := range health.GetHealthStatuses() {
		told, message = one.GetStatus().String()+" "+one.GetReason(), one.GetMessage()
	}
	return told, message
}

func (r *rig) wantHealth(pod, want string) {
	r.t.Helper()
	if told, message := r.health(pod); told != want || (told == "") != (message == "") {
		r.t.Errorf("health is %q (%s), want %q", told, message, want)
	}
}

// TestHealthOfADeferredVolume: the sandbox's word, or what its silence means. It never
// is an error, after which kubelet would keep what it was told before.
func TestHealthOfADeferredVolume(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.health = codes.InvalidArgument
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)
	r.stage()
	r.wantHealth("p1", "") // the driver knows nothing of kubelet's staging path
	r.ok(nil, r.publish("p1"))
	r.driver.said()
	r.wantHealth("p1", "") // no sandbox has mounted it yet
	r.sandboxes.known = &stats.Known{At: time.Unix(1e9, 0)}
	r.wantHealth("p1", "DEGRADED NoSandbox")

	r.broker.bound[r.target("p1")] = "s1"
	r.wantHealth("p1", "")
	for reason, want := range map[string]string{
		abi.ReasonReadOnly: "DEGRADED ReadOnly", abi.ReasonErrors: "DEGRADED ErrorsOnRecord", abi.ReasonFrozen: "DEGRADED WritesHeld",
		abi.ReasonShutDown: "INACCESSIBLE ShutDown", "": "DEGRADED Abnormal", "Moody": "DEGRADED Moody",
	} {
		r.sandboxes.health = &volume.Condition{Abnormal: true, Message: "why", Reason: reason}
		r.wantHealth("p1", want)
	}
	r.sandboxes.health = &volume.Condition{Message: "fine"}
	r.wantHealth("p1", "")
	if told, _ := r.askHealth(&csi.NodeGetVolumeHealthRequest{VolumeId: "vol-1"}); told != "" {
		t.Errorf("asked without a path: %s", told)
	}
	for kind, want := range map[volume.Kind]string{
		volume.Timeout: "DEGRADED SandboxDoesNotAnswer", volume.Absurd: "DEGRADED UsageImpossible", volume.Malformed: "DEGRADED UsageImpossible",
		volume.Refused: "DEGRADED SandboxFails", volume.Internal: "DEGRADED SandboxFails",
		volume.Unsupported: "", volume.Exhausted: "", volume.Busy: "",
	} {
		r.sandboxes.err = volume.Errorf(kind, "volume v: %s", kind)
		r.wantHealth("p1", want)
	}
	r.said() // the driver was asked of none of this
}

// TestHealthIsFitForThePodsStatus: the Kubernetes API refuses a longer message, and with
// it the whole status of the pod.
func TestHealthIsFitForThePodsStatus(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.broker.bound[r.target("p1")] = "s1"
	r.sandboxes.err = volume.Errorf(volume.Refused, "volume v: \xff%s", strings.Repeat("ä", 2000))
	if told, message := r.health("p1"); told != "DEGRADED SandboxFails" || len(message) > 1024 || len(message) < 1000 || !strings.HasPrefix(message, "volume v: ?ä") {
		t.Errorf("%s: %d bytes: %s", told, len(message), message)
	}
}

// TestHealthOfASandboxThatHangs: kubelet asks for one volume after the other.
func TestHealthOfASandboxThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		got := sandboxHealth(t.Context(), &fakeSandboxes{hangs: make(chan struct{})}, &volume.Volume{Target: "/t"})
		if took := time.Since(start); took != healthTimeout || got.GetReason() != reasonHangs {
			t.Errorf("after %v: %v", took, got)
		}
	})
}

// TestHealthOfOtherVolumes is the driver's, where it has one.
func TestHealthOfOtherVolumes(t *testing.T) {
	r := newRig(t, deferAsked)
	r.driver.health = codes.InvalidArgument
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)
	r.askCapabilities()
	r.wantHealth("p1", "DATA_LOSS Driver")
	r.said("health kubelet")
	r.driver.health = codes.OK // it was downgraded
	r.wantHealth("p1", "")
	r.driver.health = codes.InvalidArgument
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	r.askCapabilities()
	r.wantHealth("p1", "")
	r.said()
	_, err := r.kubelet.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{})
	r.refused(err, codes.InvalidArgument, "volume_id")
	storage, err := r.kubelet.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || storage.GetBackendHealth()[0].GetReason() != "PathLost" {
		t.Errorf("storage: %v, %v", storage, err)
	}
}

// TestVolumeConditionOfOldKubelets: the capability by configuration, the field always.
func TestVolumeConditionOfOldKubelets(t *testing.T) {
	for _, configured := range []bool{true, false} {
		r := newRig(t, deferAll)
		r.cfg.VolumeCondition = configured
		r.restart()
		reply, err := r.kubelet.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
		r.ok(nil, err)
		if offers(reply, kubelet.VolumeCondition) != configured {
			t.Errorf("configured %v: %v", configured, reply)
		}
		r.driver.setCaps(kubelet.VolumeCondition)
		reply, err = r.kubelet.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
		r.ok(nil, err)
		if !offers(reply, kubelet.VolumeCondition) {
			t.Errorf("what the driver reports is lost: %v", reply)
		}
	}
}
