package csi

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// withoutRecords runs do while no record of the front can be written.
func (r *rig) withoutRecords(do func()) {
	r.t.Helper()
	dir := r.cfg.StateDir + "/" + staging.RecordDir
	r.ok(nil, os.Rename(dir, dir+".away"))
	do()
	r.ok(nil, os.Rename(dir+".away", dir))
}

// TestStageWhoseEndCannotBeRecorded: the driver has staged the volume. After a final error
// kubelet would not ask to unstage it.
func TestStageWhoseEndCannotBeRecorded(t *testing.T) {
	r := newRig(t, deferAll)
	dir := r.cfg.StateDir + "/" + staging.RecordDir
	r.driver.staged = func() { r.ok(nil, os.Rename(dir, dir+".away")) }
	r.refused(r.tryStage(r.stageReq()), codes.Aborted, "vol-1", "record cannot be written")
	r.ok(nil, os.Rename(dir+".away", dir))
	r.driver.staged = nil
	r.driver.said()
	r.stage()
	r.said("stage-block private")
	r.unstage()
	r.clean()
}

// TestStageThatIsNotBegunAfterAnUncertainOne: the driver may have staged the volume in an
// earlier call. This one fails before it asks the driver.
func TestStageThatIsNotBegunAfterAnUncertainOne(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.fail("stage-block", status.Error(codes.DeadlineExceeded, "slow"))
	r.refused(r.tryStage(r.stageReq()), codes.DeadlineExceeded)
	r.driver.said()
	check.WithoutDescriptors(t, func() { r.refused(r.tryStage(r.stageReq()), codes.Aborted) })
	r.withoutRecords(func() {
		r.refused(r.tryStage(r.stageReq()), codes.Aborted, "record cannot be written", "an earlier call")
	})
	r.said()
	r.driver.fail("stage-block", nil)
	r.stage()
	r.unstage()
	r.clean()
}

// TestFirstStageThatCannotBeRecorded leaves nothing: kubelet does not ask to unstage it.
func TestFirstStageThatCannotBeRecorded(t *testing.T) {
	r := newRig(t, deferAll)
	stage := r.stageReq()
	stage.Secrets = map[string]string{"key": "s3cr3t-value"}
	r.withoutRecords(func() { r.refused(r.tryStage(stage), codes.Internal, "record cannot be written") })
	r.said()
	check.That(t, !r.front.store.HoldsRequest(staging.VolumeID{Driver: driverName, ID: "vol-1"}), "the request is kept with its secrets")
	r.clean()
}

// TestTargetThatCannotBeLookedUp is a node without free descriptors: whether the volume at
// a target is deferred is not known for a moment. That is no proof that it is not.
func TestTargetThatCannotBeLookedUp(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("pod1")
	r.driver.said()
	r.broker.findErr = volume.Errorf(volume.Internal, "the kubelet root cannot be opened: %w", unix.EMFILE)
	ctx, at := t.Context(), r.target("pod1")
	_, stats := r.kubelet.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: at})
	_, expand := r.kubelet.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: "vol-1", VolumePath: at})
	_, health := r.kubelet.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: "vol-1", VolumePublishPath: at})
	for name, err := range map[string]error{
		"publish": r.publish("pod1"), "unpublish": r.unpublish("pod1"), "stats": stats, "expand": expand, "health": health,
	} {
		t.Run(name, func(t *testing.T) { check.That(t, codeOf(err) == codes.Aborted, "got %v", err) })
	}
	r.said() // a driver that is asked would act under a sandbox
	r.broker.findErr = nil
	r.ok(nil, r.publish("pod1"))
	r.ok(nil, r.unpublish("pod1"))
}

// TestPrivatePathThatCannotBeSeen is a node without free descriptors while a pod ends: a
// device that cannot be seen at its private path is still there.
func TestPrivatePathThatCannotBeSeen(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("pod1")
	r.driver.said()
	check.WithoutDescriptors(t, func() { r.refused(r.unpublish("pod1"), codes.Aborted, r.cfg.PrivateDir) })
	r.said()
	r.ok(nil, r.unpublish("pod1"))
	r.said("unpublish private")
	check.WithoutDescriptors(t, func() { r.refused(r.tryUnstage(), codes.Aborted, r.cfg.PrivateDir) })
	r.said()
	r.unstage()
	r.said("unstage private")
	r.clean()
}

func TestCallsWaitShortlyForTheirVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &driverProxy{front: &Front{}, driver: &staging.Driver{Name: "d"}}
		call := func(ctx context.Context, id string) error {
			return check.Err(p.withLock(ctx, id, "/path", nil, func(staging.VolumeID) ([]byte, error) { return nil, nil }))
		}
		end := check.Value(p.front.locks.Lock(t.Context(), staging.VolumeID{Driver: "d", ID: "v"}))(t)
		check.Must(t, call(t.Context(), "w")) // or another volume waits
		began := time.Now()
		err := call(t.Context(), "v")
		check.That(t, volume.KindOf(err) == volume.Busy && time.Since(began) == lockTimeout, "after %v: %v", time.Since(began), err)
		check.Kind(t, call(check.Within(t, time.Second), "v"), volume.Busy) // with a deadline
		end()
	})
}

// TestDriversErrorsPassAsTheyAre: also those that hold another program's error.
func TestDriversErrorsPassAsTheyAre(t *testing.T) {
	r := newRig(t, &policy.Policy{})
	r.ok(nil, r.tryStage(r.stageReq()))
	for step, call := range map[string]func() error{
		"publish-mount": func() error { return r.tryPublish(r.publishReq("p1")) },
		"unstage":       r.tryUnstage,
	} {
		const text = "attach: rpc error: code = NotFound desc = no LUN 7"
		r.driver.fail(step, status.Error(codes.Internal, text))
		err := call()
		check.That(t, status.Code(err) == codes.Internal && status.Convert(err).Message() == text, "%s: %v", step, err)
	}
}

// TestVolumeIDsCannotForgeALog: errors of volumes that are not deferred are logged as they are.
func TestVolumeIDsCannotForgeALog(t *testing.T) {
	id := "vol-1\nforged" + strings.Repeat("x", 1<<20)
	r := newRig(t, &policy.Policy{})
	stage := r.stageReq()
	stage.VolumeId = id
	for _, code := range []codes.Code{codes.Unavailable, codes.Internal} {
		r.driver.fail("stage-mount", status.Error(code, "no"))
		r.driver.fail("unstage", status.Error(code, "no"))
		err := r.tryStage(stage)
		if code == codes.Internal {
			r.refused(err, codes.Aborted, "could not be undone yet")
		}
		for _, err := range []error{err, callUnderWay(staging.VolumeID{Driver: driverName, ID: id})} {
			text := err.Error()
			check.That(t, len(text) <= 1<<10 && !strings.Contains(text, "\n"), "%v: %d bytes: %.100q", code, len(text), text)
		}
	}
}

// TestHungDriverHoldsUpItsVolumeOnly has a publish that hangs in the driver.
func TestHungDriverHoldsUpItsVolumeOnly(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.broker.bound[r.target("p1")] = "s1"
	r.driver.block = make(chan struct{})
	ctx := check.Within(t, 200*time.Millisecond)
	ended := check.Begin(func() error { return check.Err(r.kubelet.NodePublishVolume(ctx, r.publishReq("p1"))) })
	other := r.stageReq()
	other.VolumeId = "vol-2"
	r.ok(r.kubelet.NodeStageVolume(t.Context(), other))
	r.ok(r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: r.target("p1")}))
	_, err := r.kubelet.NodePublishVolume(check.Within(t, 50*time.Millisecond), r.publishReq("p1"))
	code := codeOf(err)
	check.That(t, code == codes.DeadlineExceeded || code == codes.Aborted, "a second call: %v", err)
	r.refused(<-ended, codes.DeadlineExceeded)
	close(r.driver.block)
	delete(r.broker.bound, r.target("p1"))
	r.ok(nil, r.unpublish("p1"))
}
