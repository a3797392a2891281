package csi

import (
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// mounted mounts a filesystem, as the driver did before the front came, or before its records were lost.
func (r *rig) mounted(path string) {
	r.t.Helper()
	check.NeedsRoot(r.t)
	r.ok(nil, os.MkdirAll(path, 0o750))
	r.ok(nil, unix.Mount("none", path, "ramfs", 0, ""))
	r.t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
}

// TestStageOfAVolumeThatAPodHasOnTheHost: kubelet repeats the stage after its restart, and the driver
// does not unstage the volume under the pod, whatever it has answered and the rules say.
func TestStageOfAVolumeThatAPodHasOnTheHost(t *testing.T) {
	for name, c := range map[string]struct {
		first error
		rules *policy.Policy
		then  error
	}{
		"uncertain, then deferred":                 {first: status.Error(codes.Unavailable, "gone"), rules: deferAll},
		"done, then deferred":                      {rules: deferAll},
		"uncertain, then refused":                  {first: status.Error(codes.DeadlineExceeded, "slow"), rules: &policy.Policy{}, then: status.Error(codes.Internal, "broken")},
		"refused, then deferred":                   {first: status.Error(codes.Internal, "broken"), rules: deferAll},
		"uncertain, then deferred and not certain": {first: status.Error(codes.Unavailable, "gone"), rules: deferAll, then: status.Error(codes.Unavailable, "gone")},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, &policy.Policy{})
			r.mounted(r.staging())
			r.driver.fail("stage-mount", c.first)
			check.Equal(t, codeOf(r.tryStage(r.stageReq())), codeOf(c.first), "the first answer")
			r.cfg.Policy = c.rules
			r.restart()
			r.driver.fail("stage-mount", c.then)
			check.Equal(t, codeOf(r.tryStage(r.stageReq())), codeOf(c.then), "the second answer")
			r.said("stage-mount kubelet", "stage-mount kubelet")
			if c.rules == deferAll { // another pod
				r.refused(r.publish("p2"), codes.FailedPrecondition, "before crust-proxy", "delete every pod")
			}
			r.said()
			r.unstage()
			r.said("unstage kubelet")
			r.clean()
		})
	}
}

// TestStageOfAVolumeThatIsOnlyPublished: the driver mounts nothing at the staging path.
func TestStageOfAVolumeThatIsOnlyPublished(t *testing.T) {
	r := newRig(t, &policy.Policy{})
	r.ok(nil, r.publish("p1"))
	r.front.SetPolicy(deferAll)
	r.ok(nil, r.front.store.Private.MakeDir(r.front.store.Private.Staging(staging.VolumeID{Driver: driverName, ID: "vol-1"}, r.staging())))
	r.stage()
	r.said("publish-mount kubelet", "stage-mount kubelet") // and not to unstage, under the pod
	r.end("p1")
}

// TestPublishOfAVolumeThatAPodHasOnTheHost: kubelet repeats the publish, and the driver has no STAGE, or mounts nothing at
// the staging path.
func TestPublishOfAVolumeThatAPodHasOnTheHost(t *testing.T) {
	for name, stages := range map[string]bool{"without STAGE": false, "attached at stage": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferAll)
			r.mounted(r.target("p1"))
			if stages {
				r.stage()
			} else {
				r.driver.setCaps()
			}
			r.driver.said()
			req := r.publishReq("p1")
			if !stages {
				req.StagingTargetPath = ""
			}
			for range 2 {
				r.ok(nil, r.tryPublish(req))
				r.said("publish-mount kubelet")
			}
			check.Must(t, unix.Unmount(r.target("p1"), 0)) // in the driver's place
			r.ok(nil, r.unpublish("p1"))
			r.said("unpublish kubelet")
			req.TargetPath, req.VolumeContext = r.target("p2"), nil
			r.ok(nil, r.tryPublish(req))
			r.said("publish-block private")
		})
	}
}

// TestMountsThatAreNoPods: a guard without a record, and what a driver mounted that was to defer.
func TestMountsThatAreNoPods(t *testing.T) {
	r := nativeRig(t)
	r.mounted(r.target("p1"))
	r.ok(nil, r.front.store.Records.Put(staging.Record{VolumeID: staging.VolumeID{Driver: driverName, ID: "vol-1"}, Uncertain: []string{r.target("p1")}}))
	r.ok(nil, r.publish("p1"))
	r.said("publish-deferred kubelet")
	r.ok(nil, os.MkdirAll(r.target("p2"), 0o750))
	r.ok(nil, guard.Mount("key", r.target("p2")))
	t.Cleanup(func() { _ = unix.Unmount(r.target("p2"), unix.MNT_DETACH) })
	mounted, err := staging.MountedOnHost(t.Context(), r.target("p2"))
	check.That(t, !mounted && err == nil, "a guard is taken for a volume on the host: %v", err)
	ended, end := context.WithCancel(t.Context())
	end()
	check.That(t, check.Err(staging.MountedOnHost(ended, r.target("p1"))) != nil, "nothing mounted, by a table that could not be read")
}
