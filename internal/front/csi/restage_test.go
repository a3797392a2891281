package csi

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestInterruptedRestageIsNotTakenForDone changes the verdict of a staged volume. The driver stages it anew, and its
// answer is uncertain, or never comes. The driver of this test publishes whatever is at the staging path: the next
// publish must not reach it before it has staged the volume.
func TestInterruptedRestageIsNotTakenForDone(t *testing.T) {
	none := &policy.Policy{}
	for name, test := range map[string]struct {
		before, after   *policy.Policy
		unstage, way    string
		stage, publish  string
		restart, secret bool
	}{
		"to a device":                     {before: deferAsked, after: deferAll, unstage: "unstage kubelet", way: "stage-block", stage: "stage-block private", publish: "publish-block private"},
		"to the host":                     {before: deferAll, after: none, unstage: "unstage private", way: "stage-mount", stage: "stage-mount kubelet", publish: "publish-mount kubelet"},
		"to a device, after a restart":    {before: deferAsked, after: deferAll, unstage: "unstage kubelet", way: "stage-block", stage: "stage-block private", publish: "publish-block private", restart: true},
		"to the host, after a restart":    {before: deferAll, after: none, unstage: "unstage private", way: "stage-mount", stage: "stage-mount kubelet", publish: "publish-mount kubelet", restart: true},
		"to a device, with a secret kept": {before: deferAsked, after: deferAll, unstage: "unstage kubelet", way: "stage-block", stage: "stage-block private", publish: "publish-block private", secret: true},
	} {
		for _, code := range []codes.Code{codes.Unavailable, codes.DeadlineExceeded} {
			t.Run(name+" "+code.String(), func(t *testing.T) {
				r := newRig(t, test.before)
				stage := r.stageReq()
				if test.secret {
					stage.Secrets = map[string]string{"key": "s3cr3t-value"}
				}
				r.ok(nil, r.tryStage(stage))
				r.driver.said()
				r.cfg.Policy = test.after
				r.front.SetPolicy(test.after)
				r.driver.fail(test.way, status.Error(code, "the driver has gone"))
				r.refused(r.publish("p1"), code)
				r.said(test.unstage, test.stage)
				if test.restart {
					r.restart()
				}
				r.refused(r.publish("p1"), code)
				r.said(test.stage)
				r.driver.fail(test.way, nil)
				r.ok(nil, r.publish("p1"))
				r.said(test.stage, test.publish)
				r.ok(nil, r.unpublish("p1"))
				r.ok(nil, r.publish("p2")) // it is staged, and not staged again
				r.ok(nil, r.unpublish("p2"))
				calls := strings.Join(r.driver.said(), " ")
				check.That(t, !strings.Contains(calls, "stage-"), "staged again: %s", calls)
				r.unstage()
				r.clean()
			})
		}
	}
}

// TestUnstageWhoseAnswerIsLost changes the rules, so that the volume is unstaged, and back before
// the driver has answered: it may have nothing staged any more, and the next publish must not
// reach it before it has staged the volume again.
func TestUnstageWhoseAnswerIsLost(t *testing.T) {
	for name, test := range map[string]struct {
		before, after *policy.Policy
		unstage       string
		calls         []string
	}{
		"of a device":       {deferAll, &policy.Policy{}, "unstage private", []string{"stage-block private", "publish-block private"}},
		"of the filesystem": {deferAsked, deferAll, "unstage kubelet", []string{"stage-mount kubelet", "publish-mount kubelet"}},
	} {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restart %v", name, restart), func(t *testing.T) {
				r := newRig(t, test.before)
				r.stage()
				r.driver.said()
				r.front.SetPolicy(test.after)
				r.driver.fail("unstage", status.Error(codes.DeadlineExceeded, "no answer"))
				r.refused(r.publish("p1"), codes.DeadlineExceeded)
				r.said(test.unstage)
				r.driver.fail("unstage", nil)
				if restart {
					r.restart()
				}
				r.front.SetPolicy(test.before)
				r.ok(nil, r.publish("p1"))
				r.said(test.calls...)
				r.end("p1")
			})
		}
	}
}

// TestRestageThatIsInterruptedAndThenChangedBack has the rules changed back before the driver has answered.
func TestRestageThatIsInterruptedAndThenChangedBack(t *testing.T) {
	r := newRig(t, deferAsked)
	r.stage()
	r.front.SetPolicy(deferAll)
	r.driver.fail("stage-block", status.Error(codes.Unavailable, "the driver has gone"))
	r.refused(r.publish("p1"), codes.Unavailable)
	r.driver.said()
	r.front.SetPolicy(&policy.Policy{})
	r.ok(nil, r.publish("p1"))
	r.said("unstage private", "stage-mount kubelet", "publish-mount kubelet")
	r.end("p1")
}

// TestStageThatIsRefusedAfterItMayHaveBeenDone has the driver's final word come
// after an uncertain one: kubelet will not ask to unstage the volume.
func TestStageThatIsRefusedAfterItMayHaveBeenDone(t *testing.T) {
	r := newRig(t, deferAll)
	stage := func() error { _, err := r.kubelet.NodeStageVolume(t.Context(), r.stageReq()); return err }
	r.driver.fail("stage-block", status.Error(codes.DeadlineExceeded, "slow"))
	r.refused(stage(), codes.DeadlineExceeded)
	r.driver.said()
	r.driver.fail("stage-block", status.Error(codes.InvalidArgument, "no block access"))
	r.driver.fail("unstage", status.Error(codes.Internal, "busy now"))
	r.refused(stage(), codes.Aborted, "no block access", "could not be undone yet", "busy now")
	r.driver.fail("unstage", nil)
	r.driver.said()
	r.refused(stage(), codes.InvalidArgument, "no block access")
	r.said("stage-block private", "unstage private")
	r.clean()
}

// TestRefusedStagesLeaveNoSecretsInMemory: kubelet does not ask to unstage them.
func TestRefusedStagesLeaveNoSecretsInMemory(t *testing.T) {
	r := newRig(t, deferAll)
	stage := r.stageReq()
	stage.Secrets = map[string]string{"key": "s3cr3t-value"}
	r.driver.fail("stage-block", status.Error(codes.InvalidArgument, "no block access"))
	r.refused(r.tryStage(stage), codes.InvalidArgument)
	check.That(t, !r.front.store.HoldsRequest(staging.VolumeID{Driver: driverName, ID: "vol-1"}), "the request is kept with its secrets")
	r.clean()
}

// TestDeviceStagedBeforeAReboot: records do not outlive a reboot, the private path does, and the host has the volume next.
// The driver is asked to unstage the device while nothing is mounted, until it does.
func TestDeviceStagedBeforeAReboot(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.ok(nil, os.RemoveAll(r.cfg.StateDir))
	r.cfg.Policy = &policy.Policy{}
	r.restart()
	r.driver.fail("unstage", status.Error(codes.Internal, "cryptsetup is not ready"))
	r.refused(r.tryStage(r.stageReq()), codes.Internal, "cryptsetup")
	r.driver.fail("unstage", nil)
	r.begin("p1")
	r.said("stage-block private", "unstage private", "unstage private", "stage-mount kubelet", "publish-mount kubelet")
	r.end("p1")
	r.said("unpublish kubelet", "unstage kubelet")
}

// TestInterruptedPublishIsUndoneBeforeAnotherWay has a publish as a device end
// without a certain answer, and the rules keep the volume on the host then.
func TestInterruptedPublishIsUndoneBeforeAnotherWay(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.driver.fail("publish-block", status.Error(codes.Unavailable, "the driver has gone"))
	r.refused(r.publish("p1"), codes.Unavailable)
	r.driver.said()
	r.cfg.Policy = &policy.Policy{}
	r.restart()
	r.driver.fail("unpublish", status.Error(codes.Internal, "busy now"))
	r.refused(r.publish("p1"), codes.Aborted, "interrupted", "busy now")
	r.driver.fail("unpublish", nil)
	r.driver.said()
	r.ok(nil, r.publish("p1"))
	r.said("unpublish private", "unstage private", "stage-mount kubelet", "publish-mount kubelet")
	r.ok(nil, r.unpublish("p1"))
	r.said("unpublish kubelet")
	r.unstage()
	r.clean()
}

// TestInterruptedPublishIsUndoneBeforeTheDriverDefers is the same with a driver that
// was upgraded and defers by itself now.
func TestInterruptedPublishIsUndoneBeforeTheDriverDefers(t *testing.T) {
	r := nativeRig(t)
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	r.stage()
	r.driver.fail("publish-block", status.Error(codes.DeadlineExceeded, "slow"))
	r.refused(r.publish("p1"), codes.DeadlineExceeded)
	r.driver.said()
	r.driver.setCaps(nativeCaps()...)
	r.ok(nil, r.publish("p1"))
	r.said("unpublish private", "unstage private", "stage-mount kubelet", "publish-deferred kubelet")
	r.end("p1")
}
