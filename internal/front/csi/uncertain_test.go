package csi

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestRefusalAfterAnUncertainPublish: kubelet asks to unpublish after an uncertain
// error, and not after a final one. So the final one may leave nothing of either call.
func TestRefusalAfterAnUncertainPublish(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.driver.fail("publish-block", status.Error(codes.Unavailable, "the driver has gone"))
	r.refused(r.publish("p1"), codes.Unavailable)
	r.driver.fail("publish-block", status.Error(codes.InvalidArgument, "no block access"))
	r.driver.fail("unpublish", status.Error(codes.Internal, "busy now"))
	r.refused(r.publish("p1"), codes.Aborted, "no block access", "could not be undone yet", "busy now")
	r.driver.fail("unpublish", nil)
	r.driver.said()
	r.refused(r.publish("p1"), codes.InvalidArgument, "no block access")
	r.said("publish-block private", "unpublish private")

	r.driver.fail("publish-block", status.Error(codes.Unavailable, "the driver has gone"))
	r.refused(r.publish("p1"), codes.Unavailable)
	r.driver.said() // the policy refuses then, and the driver is not asked again
	r.front.SetPolicy(&policy.Policy{Rules: []policy.Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true}}})
	r.refused(r.publish("p1"), codes.Unimplemented, `rule "kata"`)
	r.said("unpublish private")
	r.unstage()
	r.clean()
}

// TestFinalErrorOnTheHostAfterAnUncertainOne: kubelet asks to unpublish after neither of the two, so the volume may not
// count as this pod's any more, unless the target may show it: after a repeated call, a pod runs with it.
func TestFinalErrorOnTheHostAfterAnUncertainOne(t *testing.T) {
	for _, method := range []string{"publish-mount", "publish-block"} {
		for name, c := range map[string]struct {
			make  func(target string) error
			stays bool
		}{
			"nothing there": {make: func(string) error { return nil }},
			"a directory":   {make: func(target string) error { return os.Mkdir(target, 0o750) }},
			"a file":        {make: func(target string) error { return os.WriteFile(target, nil, 0o600) }},
			"a link":        {make: func(target string) error { return os.Symlink("/", target) }, stays: true},
			"not readable": {make: func(target string) error { // ENOTDIR
				return errors.Join(os.Remove(filepath.Dir(target)), os.WriteFile(filepath.Dir(target), nil, 0o600))
			}, stays: true},
		} {
			t.Run(method+", "+name, func(t *testing.T) {
				r := newRig(t, deferAsked)
				r.ok(nil, os.MkdirAll(filepath.Dir(r.target("p1")), 0o750)) // as kubelet does
				r.stage()
				req := r.publishReq("p1")
				if method == "publish-block" {
					req.VolumeCapability = staging.AsBlock(req.GetVolumeCapability())
				}
				r.driver.fail(method, status.Error(codes.DeadlineExceeded, "slow"))
				r.refused(r.tryPublish(req), codes.DeadlineExceeded)
				marked := func() bool {
					rec := r.front.store.Records.Get(staging.VolumeID{Driver: driverName, ID: "vol-1"})
					return len(rec.OnHost)+len(rec.Raw) > 0
				}
				check.Require(t, marked(), "it may be on the host, and is not on record")
				r.ok(nil, c.make(r.target("p1")))
				r.driver.fail(method, status.Error(codes.NotFound, "no such disk"))
				r.refused(r.tryPublish(req), codes.NotFound)
				check.That(t, marked() == c.stays, "on record as on the host: %v", marked())
				r.driver.fail(method, nil)
				r.front.SetPolicy(deferAll)
				err := r.publish("p2")
				deferred := len(r.broker.volumes) > 0
				check.That(t, deferred != c.stays && (c.stays || err == nil), "another pod's is deferred: %v, %v", deferred, err)
			})
		}
	}
}

// TestDeviceThatIsStillWrittenToIsNotGivenBack: mkfs outlives its caller and the daemon, and
// a driver that unpublishes or unstages may detach the device under it.
func TestDeviceThatIsStillWrittenToIsNotGivenBack(t *testing.T) {
	for name, c := range map[string]struct {
		caps   []csi.NodeServiceCapability_RPC_Type
		asked  string
		undone []string
	}{
		"block":  {[]csi.NodeServiceCapability_RPC_Type{1}, "publish-block private", []string{"unpublish private", "unstage private"}},
		"native": {[]csi.NodeServiceCapability_RPC_Type{1, 1007}, "publish-deferred kubelet", []string{"unpublish kubelet", "unstage kubelet"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferAll)
			r.driver.setCaps(c.caps...)
			r.driver.answer = &csidefer.Mount{Device: "/dev/fake", FSType: "ext4"}
			r.stage()
			r.driver.said()
			r.writing = volume.Errorf(volume.Busy, "mkfs still writes")
			r.broker.stageErr = volume.Errorf(volume.Timeout, "mkfs still runs")
			r.refused(r.publish("p1"), codes.Aborted, "mkfs still runs", "mkfs still writes")
			r.restart()
			r.refused(r.unpublish("p1"), codes.Aborted, "vol-1", driverName, "mkfs still writes")
			r.refused(r.tryUnstage(), codes.Aborted, "mkfs still writes")
			r.front.SetPolicy(&policy.Policy{}) // the host would have it
			r.refused(r.publish("p2"), codes.Aborted, "mkfs still writes")
			raw := r.publishReq("p3")
			raw.VolumeCapability = staging.AsBlock(raw.GetVolumeCapability())
			r.refused(r.tryPublish(raw), codes.Aborted, "mkfs still writes")
			r.said(c.asked)
			r.writing = nil
			r.ok(nil, r.unpublish("p1"))
			r.unstage()
			r.said(c.undone...)
			r.clean()
		})
	}
}

// TestRepeatedStageThatIsRefused: the volume is staged, and after a final code kubelet would not ask to unstage it.
func TestRepeatedStageThatIsRefused(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	stage := func() error { _, err := r.kubelet.NodeStageVolume(t.Context(), r.stageReq()); return err }
	r.driver.fail("stage-block", status.Error(codes.InvalidArgument, "no block access"))
	r.refused(stage(), codes.Aborted, "no block access", "stays")
	r.driver.fail("stage-block", nil)
	r.front.SetPolicy(&policy.Policy{Rules: []policy.Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true}}})
	r.refused(stage(), codes.Aborted, `rule "kata"`, "stays")
	r.unstage()
	r.clean()
}

// TestPublishWhileItsOwnRemovalIsUnderWay: a pod of the same name comes back before
// the removal of its volume has ended. No other pod has the volume.
func TestPublishWhileItsOwnRemovalIsUnderWay(t *testing.T) {
	for name, test := range map[string]struct {
		policy *policy.Policy
		asked  []string
	}{
		"deferred again": {deferThenHost, []string{"publish-block private"}},
		"on the host":    {&policy.Policy{}, []string{"unpublish private", "unstage private", "stage-mount kubelet", "publish-mount kubelet"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferThenHost)
			r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
				csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
			r.begin("p1")
			r.driver.said()
			r.broker.removing = map[string]bool{r.target("p1"): true}
			r.broker.bound[r.target("p1")] = "sandbox-7"
			r.front.SetPolicy(test.policy)
			r.refused(r.publish("p1"), codes.Aborted, "removal", "sandbox-7")
			r.refused(r.expand("p1"), codes.Aborted, "removal") // the driver would grow the filesystem on the host
			_, err := r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: r.target("p1")})
			r.ok(nil, err) // of the sandbox, and not of the directory
			r.said()
			delete(r.broker.bound, r.target("p1"))
			r.ok(nil, r.publish("p1"))
			r.said(test.asked...)
			r.end("p1")
		})
	}
}

// TestTargetOfAnotherVolume: a call names a target and a volume that do not belong together.
func TestTargetOfAnotherVolume(t *testing.T) {
	r := growing(t)
	publish := r.publishReq("p1")
	publish.VolumeId = "vol-2"
	r.refused(r.tryPublish(publish), codes.Aborted, "vol-1", "vol-2", "unpublish the other one")
	_, err := r.kubelet.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: "vol-2", TargetPath: r.target("p1")})
	r.refused(err, codes.FailedPrecondition, "vol-1", "vol-2")
	r.said()
	check.That(t, len(r.broker.volumes) == 1, "the other volume was taken back")
	r.ok(r.kubelet.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: "vol-2", VolumePath: r.target("p1")}))
	r.said("expand-mount kubelet") // as kubelet asked: the driver knows no such volume there
}

// TestUncertainPublishOfANativeDriver: the driver was asked to defer, and its answer
// did not come. What follows undoes that in the way in which it was asked.
func TestUncertainPublishOfANativeDriver(t *testing.T) {
	for name, next := range map[string]func(r *rig){
		"the rules keep it on the host": func(r *rig) {
			r.cfg.Policy = &policy.Policy{}
			r.restart()
			r.ok(nil, r.publish("p1"))
			r.said("publish-deferred kubelet", "unpublish kubelet", "publish-mount kubelet")
		},
		"the driver was downgraded": func(r *rig) {
			r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
			r.restart()
			r.ok(nil, r.publish("p1"))
			r.said("publish-deferred kubelet", "unpublish kubelet", "unstage kubelet", "stage-block private", "publish-block private")
		},
		"the driver refuses it": func(r *rig) {
			r.driver.fail("publish-deferred", status.Error(codes.InvalidArgument, "never"))
			r.refused(r.publish("p1"), codes.InvalidArgument, "never")
			r.said("publish-deferred kubelet", "publish-deferred kubelet", "unpublish kubelet")
		},
		"kubelet gives it up": func(r *rig) {
			r.restart()
			r.ok(nil, r.unpublish("p1"))
			check.That(r.t, r.toldOfDeferral(), "the driver was not told that the volume was to be deferred")
			r.driver.said()
		},
		"it succeeds": func(r *rig) {
			r.driver.fail("publish-deferred", nil)
			r.ok(nil, r.publish("p1"))
			r.said("publish-deferred kubelet", "publish-deferred kubelet")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := nativeRig(t)
			r.ok(nil, os.MkdirAll(filepath.Dir(r.target("p1")), 0o750)) // as kubelet does
			r.stage()
			r.driver.said()
			r.driver.fail("publish-deferred", status.Error(codes.DeadlineExceeded, "slow"))
			r.refused(r.publish("p1"), codes.DeadlineExceeded)
			next(r)
			r.end("p1")
		})
	}
}
