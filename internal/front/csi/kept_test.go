package csi

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// portal is a value of a publish context whose key does not look like a secret's.
const portal = "10.11.12.13:3260,iqn.2024-01.com.example:lun-of-a-tenant"

// stageWithContext is a stage request with a publish context and a secret.
func (r *rig) stageWithContext() *csi.NodeStageVolumeRequest {
	stage := r.stageReq()
	stage.PublishContext = map[string]string{"targetPortal": portal}
	stage.Secrets = map[string]string{"key": "s3cr3t-value"}
	return stage
}

func (r *rig) recordOnDisk() string {
	r.t.Helper()
	raw, err := os.ReadFile(filepath.Join(r.cfg.StateDir, staging.RecordDir, staging.FileName(staging.VolumeID{Driver: driverName, ID: "vol-1"})))
	r.ok(nil, err)
	return string(raw)
}

// holdsPortal tells whether a record holds the value, as text or in base64, which
// depends on the place at which it begins.
func holdsPortal(record string) bool {
	if strings.Contains(record, portal) {
		return true
	}
	for skip := range 3 {
		inner := portal[skip:]
		inner = inner[:len(inner)/3*3]
		if strings.Contains(record, base64.StdEncoding.EncodeToString([]byte(inner))) {
			return true
		}
	}
	return false
}

func TestRequestIsKeptOnlyWhereItMayBeNeeded(t *testing.T) {
	none := &policy.Policy{}
	excluded := &policy.Policy{Rules: []policy.Rule{{Name: "not this driver", Drivers: []string{driverName}}, {Name: "all", Defer: true}}}
	for name, test := range map[string]struct {
		policy  *policy.Policy
		context string
		caps    []csi.NodeServiceCapability_RPC_Type
		kept    bool
	}{
		"no rule":                          {policy: none},
		"a rule that excludes it":          {policy: excluded},
		"its own attribute":                {policy: deferAll, context: "false"},
		"deferred":                         {policy: deferAll, kept: true},
		"a pod that asks may come":         {policy: deferAsked, kept: true},
		"a driver that defers by itself":   {policy: none, caps: nativeCaps(), kept: true},
		"a driver with numbers of the KEP": {policy: none, caps: []csi.NodeServiceCapability_RPC_Type{1, 7, 8, 9}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, test.policy)
			if test.caps != nil {
				r.driver.setCaps(test.caps...)
			}
			stage := r.stageWithContext()
			if test.context != "" {
				stage.VolumeContext = map[string]string{policy.ContextKey: test.context}
			}
			for range 2 { // kubelet repeats it when it was restarted
				r.ok(nil, r.tryStage(stage))
				check.Equal(t, holdsPortal(r.recordOnDisk()), test.kept, "whether it holds the publish context:\n%s", r.recordOnDisk())
				check.Equal(t, r.front.store.HoldsRequest(staging.VolumeID{Driver: driverName, ID: "vol-1"}), test.kept, "the memory holds the request")
			}
			r.unstage()
			r.clean()
		})
	}
}

// TestRequestIsDroppedAfterTheWayBackToTheHost: it is needed until the driver has staged
// the volume on the host, also over a restart, and not any more then.
func TestRequestIsDroppedAfterTheWayBackToTheHost(t *testing.T) {
	r := newRig(t, deferAll)
	stage := r.stageWithContext()
	stage.Secrets = nil
	r.ok(nil, r.tryStage(stage))
	r.cfg.Policy = &policy.Policy{}
	r.restart()
	r.driver.said()
	r.driver.fail("stage-mount", status.Error(codes.Unavailable, "the driver has gone"))
	r.refused(r.publish("p1"), codes.Unavailable)
	r.said("unstage private", "stage-mount kubelet")
	check.That(t, holdsPortal(r.recordOnDisk()), "the request was dropped before the driver had staged the volume")
	r.restart()
	r.askCapabilities()
	r.driver.fail("stage-mount", nil)
	r.ok(nil, r.publish("p1"))
	r.said("stage-mount kubelet", "publish-mount kubelet")
	asked, _ := r.driver.last("stage-mount").(*csi.NodeStageVolumeRequest)
	check.That(t, asked.GetPublishContext()["targetPortal"] == portal, "the driver was asked %v", asked)
	record := r.recordOnDisk()
	check.That(t, !holdsPortal(record), "the request is kept: %s", record)
	r.end("p1")
}

// TestRuleThatComesAfterTheStage: the volume was staged when nothing could defer it.
func TestRuleThatComesAfterTheStage(t *testing.T) {
	for name, restart := range map[string]bool{"reloaded": false, "restarted": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, &policy.Policy{})
			r.ok(nil, os.MkdirAll(filepath.Dir(r.target("p1")), 0o750)) // as kubelet does
			r.ok(nil, r.tryStage(r.stageWithContext()))
			r.ok(nil, r.publish("p1"))
			r.cfg.Policy = deferAll
			r.front.SetPolicy(deferAll)
			if restart {
				r.restart()
			}
			r.ok(nil, r.publish("p1")) // what a pod has stays as it is
			r.ok(nil, r.unpublish("p1"))
			r.driver.said()
			r.refused(r.publish("p2"), codes.FailedPrecondition, r.target("p2"), "vol-1", driverName, "was not kept", "delete every pod",
				"unstaged", r.staging(), "create the pods again")
			r.said()
			got := r.cfg.Refusals.Refused()
			check.That(t, len(got) == 1 && got[0].Rule == `rule "all"`, "listed: %+v", got)
			r.unstage()
			r.ok(nil, r.tryStage(r.stageWithContext()))
			r.ok(nil, r.publish("p2"))
			r.said("unstage kubelet", "stage-block private", "publish-block private")
			r.end("p2")
		})
	}
}

// TestRuleThatComesAfterTheStageAndKubeletRestarts: kubelet stages the volume again by
// itself, and that request is enough.
func TestRuleThatComesAfterTheStageAndKubeletRestarts(t *testing.T) {
	r := newRig(t, &policy.Policy{})
	r.ok(nil, r.tryStage(r.stageWithContext()))
	r.front.SetPolicy(deferAll)
	r.driver.said()
	r.ok(nil, r.tryStage(r.stageWithContext()))
	r.ok(nil, r.publish("p1"))
	r.said("unstage kubelet", "stage-block private", "publish-block private")
	r.end("p1")
}

// TestUncertainStageOfAVolumeThatIsNeverDeferred: kubelet repeats the stage. Until then the request is in memory alone.
func TestUncertainStageOfAVolumeThatIsNeverDeferred(t *testing.T) {
	for name, restart := range map[string]bool{"in one life": false, "with a restart": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, &policy.Policy{})
			r.driver.fail("stage-mount", status.Error(codes.DeadlineExceeded, "slow"))
			r.refused(r.tryStage(r.stageWithContext()), codes.DeadlineExceeded)
			check.That(t, !holdsPortal(r.recordOnDisk()), "the record holds the publish context")
			r.driver.fail("stage-mount", nil)
			r.driver.said()
			if restart {
				r.restart()
				r.refused(r.publish("p1"), codes.FailedPrecondition, "vol-1", "stage was interrupted", "create the pods again")
				r.said()
				r.ok(nil, r.tryStage(r.stageWithContext()))
			}
			r.ok(nil, r.publish("p1"))
			r.said("stage-mount kubelet", "publish-mount kubelet")
			check.That(t, !r.front.store.HoldsRequest(staging.VolumeID{Driver: driverName, ID: "vol-1"}),
				"the memory holds the request of a finished stage")
			r.end("p1")
		})
	}
}

func TestStagedPrivatelyIsReadFromTheRecords(t *testing.T) {
	r := newRig(t, deferAll)
	got, err := staging.StagedDevices(r.dir + "/nowhere")
	check.That(t, got == nil && err == nil, "without a state directory: %+v, %v", got, err)
	r.stage()
	before := files(t, r.cfg.StateDir)
	got, err = staging.StagedDevices(r.cfg.StateDir)
	check.That(t, err == nil && slices.Equal(got, []staging.Staged{{Driver: driverName, VolumeID: "vol-1", Path: r.staging()}}), "got %+v, %v", got, err)
	live := r.front.StagedDevices()
	check.That(t, slices.Equal(live, got), "the running front has %+v", live)
	after := files(t, r.cfg.StateDir)
	check.That(t, slices.Equal(before, after), "reading changed %q to %q", before, after)
	dir := filepath.Join(r.cfg.StateDir, staging.RecordDir)
	r.ok(nil, os.WriteFile(dir+"/half.json.new", []byte("{"), 0o600))
	r.ok(nil, os.WriteFile(dir+"/other-boot.json", []byte(`{"version":1,"boot":"x","driver":"d","volumeID":"v","stage":{"path":"/p","at":"private","rule":""}}`), 0o600))
	got, err = staging.StagedDevices(r.cfg.StateDir)
	check.That(t, err == nil && len(got) == 1, "got %+v, %v", got, err)
	for name, text := range map[string]string{"bad.json": "{", "newer.json": `{"version":99}`} {
		r.ok(nil, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
		got, err = staging.StagedDevices(r.cfg.StateDir)
		check.That(t, err != nil && len(got) == 1, "%s: %+v, %v", name, got, err)
		r.ok(nil, os.Remove(dir+"/"+name))
	}
	r.front.SetPolicy(&policy.Policy{})
	r.ok(nil, r.publish("p1")) // staged anew, on the host
	got, err = staging.StagedDevices(r.cfg.StateDir)
	check.That(t, err == nil && len(got) == 0, "got %+v, %v", got, err)
	live = r.front.StagedDevices()
	check.That(t, len(live) == 0, "the running front has %+v", live)
}

// TestDriversWordsOnOtherVolumes is a driver that repeats a secret in its error on a volume
// that is not deferred. kubelet gets these words as they are; nobody else does.
func TestDriversWordsOnOtherVolumes(t *testing.T) {
	const secret = "s3cr3t-value"
	core, logged := observer.New(zap.DebugLevel)
	r := newRig(t, &policy.Policy{})
	r.calls = &telemetry.Interceptors{
		Log: zap.New(core), Metrics: telemetry.NewMetrics("test"),
		Front: &telemetry.Front{Driver: driverName, Known: passthrough.UnaryMethods(), Ours: Answered()},
	}
	r.restart()
	r.askCapabilities()
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	failed := status.Error(codes.Internal, "mount -o password="+secret+" failed")
	for _, method := range []string{"stage-mount", "publish-mount", "expand-mount"} {
		r.driver.fail(method, failed)
	}
	stage, publish := r.stageReq(), r.publishReq("p1")
	stage.Secrets = map[string]string{"password": secret}
	publish.Secrets = stage.Secrets
	r.refused(r.tryStage(stage), codes.Internal, secret)
	r.refused(r.tryPublish(publish), codes.Internal, secret)
	_, err := r.kubelet.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: "vol-1", VolumePath: r.target("p1"), VolumeCapability: publish.VolumeCapability, Secrets: stage.Secrets,
	})
	r.refused(err, codes.Internal, secret)

	// A driver that calls the Runtime API has the volume on record, and mounts another.
	r.broker.volumes[r.target("p1")] = &volume.Volume{Key: volume.KeyOf(r.target("p1")), Target: r.target("p1")}
	r.refused(r.tryPublish(publish), codes.Aborted, "[redacted]")
	detailed, err := status.New(codes.Unavailable, "mount -o password="+secret+" failed").WithDetails(&csi.VolumeUsage{})
	r.ok(nil, err)
	r.driver.fail("publish-mount", detailed.Err())
	r.refused(r.tryPublish(publish), codes.Unavailable, "[redacted]")
	for name, text := range map[string]string{"log": fmt.Sprint(logged.All()), "refusals": fmt.Sprint(r.cfg.Refusals.Refused())} {
		check.That(t, text != "[]" && !strings.Contains(text, secret), "%s: %s", name, text)
	}
}
