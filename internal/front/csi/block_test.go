package csi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

func TestUnmodifiedDriverIsAskedForADevice(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.said("stage-block private")
	r.ok(nil, r.publish("p1"))
	r.said("publish-block private")
	got := r.broker.asked
	check.That(t, strings.HasPrefix(got.Backing, r.cfg.PrivateDir+"/") && got.FSType == "ext4" && got.Format == volume.FormatHost &&
		got.Origin.Rule == `rule "all"` && got.Origin.Way == volume.WayBlock && got.Origin.VolumeID == "vol-1" && got.Driver == driverName,
		"instruction: %+v, %+v", got, got.Origin)
	asked, _ := r.driver.last("publish-block").(*csi.NodePublishVolumeRequest)
	check.That(t, asked.GetStagingTargetPath() == got.Origin.PrivateStaging && asked.GetVolumeCapability().GetAccessMode().GetMode() == rwo,
		"the driver was asked %v", asked)
	r.ok(nil, r.unpublish("p1"))
	r.said("unpublish private")
	r.unstage()
	r.said("unstage private")
	r.clean()
}

func TestEveryCallCanBeRepeatedAndRestarted(t *testing.T) {
	r := newRig(t, deferAll)
	again := func(f func()) {
		t.Helper()
		f()
		f()
		r.restart()
		f()
		r.driver.said()
	}
	again(r.stage)
	again(func() { r.ok(nil, r.publish("p1")) })
	again(r.stage) // kubelet repeats stage and publish after its restart
	again(func() { r.ok(nil, r.publish("p1")) })
	again(func() { r.ok(nil, r.unpublish("p1")) })
	again(r.unstage)
	r.clean()
}

func TestSandboxKeepsTheDevice(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.broker.bound[r.target("p1")] = "sandbox-7"
	r.driver.said()
	r.refused(r.unpublish("p1"), codes.Aborted, "sandbox-7")
	r.refused(r.tryUnstage(), codes.Aborted, "still published", r.target("p1"))
	r.said()
	delete(r.broker.bound, r.target("p1"))
	r.end("p1")
}

// TestUnpublishOfAPodThatNeverHadTheVolume: a driver that goes by the volume's id would take it from the pod that has it.
// What the driver may have published, it is asked to unpublish, also if the records are lost.
func TestUnpublishOfAPodThatNeverHadTheVolume(t *testing.T) {
	for name, c := range map[string]struct {
		make   func(r *rig, target string) error
		asked  bool
		native bool
	}{
		"nothing there":                    {make: func(*rig, string) error { return nil }},
		"a directory":                      {make: func(_ *rig, target string) error { return os.Mkdir(target, 0o750) }},
		"a directory with something in it": {make: func(_ *rig, target string) error { return os.MkdirAll(target+"/x", 0o750) }, asked: true},
		"a file, as of a raw device":       {make: func(_ *rig, target string) error { return os.WriteFile(target, nil, 0o600) }, asked: true},
		"a link":                           {make: func(_ *rig, target string) error { return os.Symlink("/", target) }, asked: true},
		"not readable": {make: func(_ *rig, target string) error { // ENOTDIR
			return errors.Join(os.Remove(filepath.Dir(target)), os.WriteFile(filepath.Dir(target), nil, 0o600))
		}, asked: true},
		"a mount": {make: func(r *rig, target string) error { r.mounted(target); return nil }, asked: true},
		"a raw device on record": {make: func(r *rig, target string) error {
			return r.front.store.Records.Put(staging.Record{VolumeID: staging.VolumeID{Driver: driverName, ID: "vol-1"}, Raw: map[string]bool{target: true}})
		}, asked: true},
		"a driver that defers by itself": {make: func(*rig, string) error { return nil }, asked: true, native: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferAll)
			if c.native {
				r = nativeRig(t)
			}
			r.begin("p1")
			r.refused(r.publish("p2"), codes.FailedPrecondition, "one sandbox")
			r.ok(nil, os.MkdirAll(filepath.Dir(r.target("p2")), 0o750))
			r.ok(nil, c.make(r, r.target("p2")))
			r.driver.said()
			_ = r.unpublish("p2")
			asked := r.driver.said()
			check.Equal(t, len(asked) > 0, c.asked, "the driver was asked for %q", asked)
			check.That(t, c.asked || check.Err(os.Lstat(r.target("p2"))) != nil, "the target is left")
		})
	}
}

func TestLostRecordsAreNoObstacle(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	// A reboot: /run is empty, the private paths are on disk.
	check.Must(t, os.RemoveAll(r.cfg.StateDir))
	clear(r.broker.volumes)
	r.restart()
	r.driver.said()
	r.ok(nil, r.unpublish("p1"))
	r.said("unpublish private")
	r.unstage()
	r.said("unstage private") // at kubelet's path it has nothing, and could take what lies there for the volume
	r.clean()
}

func TestRecordsOfAnEarlierBootMeanNothing(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	file := filepath.Join(r.cfg.StateDir, staging.RecordDir, staging.FileName(staging.VolumeID{Driver: driverName, ID: "vol-1"}))
	record := regexp.MustCompile(`"boot":"[^"]*"`).ReplaceAllString(r.recordOnDisk(), `"boot":"earlier"`)
	r.ok(nil, os.WriteFile(file, []byte(record), 0o600))
	r.restart()
	rec := r.front.store.Records.Get(staging.VolumeID{Driver: driverName, ID: "vol-1"})
	check.That(t, rec.Stage == nil, "the record was taken: %+v", rec)
}

func TestFailedHandOverLeavesNothing(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.driver.said()
	r.broker.stageErr = volume.Errorf(volume.InUse, "volume v: its device is mounted on the host")
	r.refused(r.publish("p1"), codes.FailedPrecondition, "mounted on the host")
	r.said("publish-block private", "unpublish private")
	r.driver.fail("unpublish", status.Error(codes.Internal, "busy now"))
	r.refused(r.publish("p1"), codes.Aborted, "mounted on the host", "could not be undone yet", "busy now")
	r.driver.fail("unpublish", nil)
	r.end("p1")
}

func TestFailedRepeatLeavesThePublishedVolume(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.driver.said()
	r.driver.fail("publish-block", status.Error(codes.Internal, "not now"))
	r.refused(r.publish("p1"), codes.Aborted, "not now", "stays") // after a final code kubelet would not unpublish it
	r.driver.fail("publish-block", nil)
	r.broker.stageErr = volume.Errorf(volume.Internal, "no projection")
	r.refused(r.publish("p1"), codes.Aborted, "no projection")
	r.said("publish-block private", "publish-block private")
	check.That(t, len(r.broker.volumes) == 1, "the published volume has gone")
}

func TestStatsComeFromTheSandbox(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	ask := &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: r.target("p1")}
	r.refused(check.Err(r.kubelet.NodeGetVolumeStats(t.Context(), ask)), codes.Unavailable)
	r.sandboxes.known = &stats.Known{At: time.Unix(1e9, 0), Report: volume.Report{Usage: []volume.Usage{{Total: 5}}}}
	r.refused(check.Err(r.kubelet.NodeGetVolumeStats(t.Context(), ask)), codes.Unavailable) // what was true of an earlier sandbox is no answer
	r.broker.bound[r.target("p1")] = "s1"
	reply, err := r.kubelet.NodeGetVolumeStats(t.Context(), ask)
	r.ok(nil, err)
	old, err := kubelet.Condition(reply)
	check.That(t, err == nil && !old.GetAbnormal() && old.GetMessage() != "" && reply.GetUsage()[0].GetTotal() == 10 && reply.GetUsage()[0].GetUnit() == csi.VolumeUsage_BYTES,
		"fresh: %v, %v", reply, err)
	calls := r.driver.said()
	check.That(t, len(calls) == 2, "the driver was asked: %q", calls)
}

// TestStagedDeviceOfNoPod: the driver would answer for what lies at kubelet's paths, which is
// the node's disk, or grow that.
func TestStagedDeviceOfNoPod(t *testing.T) {
	r := newRig(t, deferAll)
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.stage()
	r.driver.said()
	for _, path := range []string{r.staging(), r.target("p1")} {
		ask := &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: path}
		r.refused(check.Err(r.kubelet.NodeGetVolumeStats(t.Context(), ask)), codes.NotFound, path, "no pod has it")
		grow := &csi.NodeExpandVolumeRequest{VolumeId: "vol-1", VolumePath: path, StagingTargetPath: r.staging(), VolumeCapability: mountCap(rwo, "ext4")}
		r.refused(check.Err(r.kubelet.NodeExpandVolume(t.Context(), grow)), codes.FailedPrecondition, path, "no pod has it")
	}
	r.said()
	raw := r.rawStaging() + "/publish/p1" // a second persistent volume may name the same volume
	r.ok(r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: raw}))
	r.said("stats kubelet")
}

// TestAGrownFilesystemNeedsNoSandbox: what the node grew before the hand-over is not
// asked of a sandbox that cannot grow anything.
func TestAGrownFilesystemNeedsNoSandbox(t *testing.T) {
	r := growing(t)
	r.broker.size = 2 << 30
	r.filesystem = 1 << 30
	r.refused(r.grow(), codes.FailedPrecondition, "when the pod is deleted and started again")
	r.filesystem = 2<<30 - 4096
	r.ok(nil, r.grow())
	r.filesystem = 3 << 30 // a superblock that the guest has forged
	r.refused(r.grow(), codes.FailedPrecondition, "kata")
}

// TestGrowthThatARuleForbids: nobody is told that the pod has to be started again.
func TestGrowthThatARuleForbids(t *testing.T) {
	r := newRig(t, &policy.Policy{Rules: []policy.Rule{{Name: "all", Defer: true, Grow: new(false)}}})
	r.begin("p1")
	r.broker.size, r.filesystem = 2<<30, 1<<30
	r.refused(r.expand("p1"), codes.FailedPrecondition, "cannot grow its filesystem", "rule says grow: false; without that it grows when the pod is deleted")
}

// TestGrowthBesideAnUnpublish: neither the device of a volume that was released meanwhile is grown, nor its successor.
func TestGrowthBesideAnUnpublish(t *testing.T) {
	for _, again := range []bool{false, true} {
		r := growing(t)
		r.broker.size, r.broker.abilities.GrowsAtMount = 2<<30, true
		unlock := check.Value(r.front.locks.Lock(t.Context(), staging.VolumeID{Driver: driverName, ID: "vol-1"}))(t) // as unpublish does
		found := make(chan struct{})
		r.broker.found = sync.OnceFunc(func() { close(found) })
		done := check.Begin(func() error { return r.expand("p1") })
		<-found
		r.broker.mu.Lock()
		successor := *r.broker.volumes[r.target("p1")]
		successor.Created = time.Now()
		delete(r.broker.volumes, r.target("p1"))
		if again {
			r.broker.volumes[r.target("p1")] = &successor
		}
		r.broker.mu.Unlock()
		unlock()
		r.refused(<-done, codes.Aborted, "removal")
		r.said()
		check.That(t, successor.GrowTo == 0, "the successor is to grow to %d", successor.GrowTo)
	}
}

func TestGrowth(t *testing.T) {
	r := growing(t)
	v := r.broker.volumes[r.target("p1")]
	r.refused(r.grow(), codes.FailedPrecondition, "has not grown the device")
	r.said("expand-block private")
	r.driver.grown = func() { r.broker.size = 2 << 30 }
	r.refused(r.grow(), codes.FailedPrecondition, "cannot grow its filesystem", "kata", "when the pod is deleted")
	check.That(t, v.GrowTo == 2<<30, "the growth that waits is not on record: %d", v.GrowTo)
	v.GrowTo, r.broker.bound[v.Target] = 0, "s1"
	r.sandboxes.err = volume.Errorf(volume.Unsupported, "volume v: the agent does not resize")
	r.refused(r.grow(), codes.FailedPrecondition, "the agent does not resize", "when the pod is deleted")
	check.That(t, v.GrowTo == 2<<30, "the growth that a sandbox refused is not on record: %d", v.GrowTo)
	v.GrowTo, r.broker.bound[v.Target], r.broker.abilities.GrowsAtMount = 0, "", true
	r.ok(nil, r.grow())
	check.That(t, v.GrowTo == 2<<30, "grow at mount: %d", v.GrowTo)
	for kind, code := range map[volume.Kind]codes.Code{volume.Exhausted: codes.OK, volume.Internal: codes.OK, volume.Busy: codes.Aborted} {
		r.broker.growErr = volume.Errorf(kind, "volume v: the growth is not on record")
		r.refused(r.grow(), code) // the next mount grows the filesystem all the same
	}
	v.GrowTo, r.broker.bound[v.Target], r.sandboxes.err = 0, "s1", nil
	ask := &csi.NodeExpandVolumeRequest{VolumeId: "vol-1", VolumePath: r.staging(), CapacityRange: &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1 << 40}}
	r.ok(r.kubelet.NodeExpandVolume(t.Context(), ask)) // kubelet may name it by the staging path
	check.That(t, v.GrowTo == 0, "the sandbox was not asked, and the growth is left for the next one: %d", v.GrowTo)
	r.sandboxes.err = volume.Errorf(volume.Unsupported, "volume v: the agent does not resize")
	r.refused(r.grow(), codes.FailedPrecondition, "the agent does not resize")
	r.sandboxes.err = volume.Errorf(volume.Timeout, "volume v: hangs")
	r.refused(r.grow(), codes.DeadlineExceeded)
	ask.CapacityRange.LimitBytes = 1
	r.refused(check.Err(r.kubelet.NodeExpandVolume(t.Context(), ask)), codes.InvalidArgument)
}

// TestRepeatedPublishOfAnEditedVolume: somebody edits the mount options and access mode of the persistent volume, and the
// driver is upgraded and takes groups, or turns out to have no raw block volumes. What the pod has stays, unless it would
// be writable or not. Without an OK, kubelet restarts none of the pod's containers.
func TestRepeatedPublishOfAnEditedVolume(t *testing.T) {
	for name, native := range map[string]bool{"as a device": false, "by the driver": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, deferAll)
			if native {
				r = nativeRig(t)
			}
			r.begin("p1")
			first := r.broker.asked
			edited := func(pod string, mode csi.VolumeCapability_AccessMode_Mode, flags ...string) volume.Instruction {
				req := r.publishReq(pod)
				req.VolumeCapability.AccessMode.Mode = mode
				req.GetVolumeCapability().GetMount().MountFlags, req.GetVolumeCapability().GetMount().VolumeMountGroup = flags, "2000"
				if native {
					r.driver.answer.Flags = flags
				}
				r.ok(nil, r.tryPublish(req))
				return r.broker.asked
			}
			again := edited("p1", csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, "nodiscard", "noatime")
			check.That(t, slices.Equal(again.MountFlags, first.MountFlags) && again.Group == "", "again: %+v", again)
			check.Equal(t, fmt.Sprint(edited("p1", rwo, "ro").MountFlags), "[ro]", "which the broker refuses")
			r.ok(nil, r.unpublish("p1"))
			next := edited("p2", rwo, "nodiscard")
			check.That(t, slices.Contains(next.MountFlags, "nodiscard") && next.Group == "2000", "the next pod: %+v", next)
			r.broker.volumes[r.target("p2")].Driver = "csi.civo.com"
			r.ok(r.as("csi.civo.com").NodePublishVolume(t.Context(), r.publishReq("p2")))
		})
	}
}

func TestSecretsStayInMemory(t *testing.T) {
	r := newRig(t, deferAll)
	const secret, token = "s3cr3t-value", "tok3n-value"
	stage := r.stageReq()
	stage.Secrets = map[string]string{"key": secret}
	stage.VolumeContext = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": token, "pool": "rbd"}
	r.ok(r.kubelet.NodeStageVolume(t.Context(), stage))
	asked, _ := r.driver.last("stage-block").(*csi.NodeStageVolumeRequest)
	check.That(t, asked.GetSecrets()["key"] == secret && asked.GetVolumeContext()["csi.storage.k8s.io/serviceAccount.tokens"] == token,
		"the driver was not given the secrets")
	for _, name := range files(t, r.cfg.StateDir) {
		raw, readErr := os.ReadFile(name)
		has := func(text string) bool { return strings.Contains(string(raw), text) }
		check.That(t, readErr == nil && !has(secret) && !has(token) && !has("czNjcjN0LXZhbHVl"), // base64
			"%s holds a secret, or cannot be read: %v", name, readErr)
	}
	publish := r.publishReq("p1")
	publish.Secrets = map[string]string{"key": secret}
	publish.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"], publish.VolumeContext["authMode"] = token, "none"
	r.driver.fail("publish-block", status.Error(codes.Internal, "login with "+secret+", "+token+", none failed"))
	r.refused(r.tryPublish(publish), codes.Internal, "login with [redacted], [redacted], none failed")
}
