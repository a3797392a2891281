package csi

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
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
	check.WithoutDescriptors(t, func() {
		r.refused(r.tryStage(r.stageReq()), codes.Aborted)
	})
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
	r.withoutRecords(func() {
		r.refused(r.tryStage(stage), codes.Internal, "record cannot be written")
	})
	r.said()
	if r.front.store.HoldsRequest(staging.VolumeID{Driver: driverName, ID: "vol-1"}) {
		t.Error("the request is kept with its secrets")
	}
	r.clean()
}
