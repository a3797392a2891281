//go:build system

package driver_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// testDriver is a driver over directories of its own.
type testDriver struct {
	csi.ControllerClient
	csi.NodeClient
	csi.IdentityClient
	csi.GroupControllerClient
	t       *testing.T
	dir     string
	data    string // where its images are
	leaves  bool   // something is left at the end of the test, and may be
	process *rig.Process
	conn    *grpc.ClientConn
}

// newDriver starts a driver whose images lie on a real disk, where direct I/O works.
func newDriver(t *testing.T, native bool, args ...string) *testDriver {
	t.Helper()
	return newDriverOn(t, "", native, args...)
}

// aMinute is for tests that have to freeze: below a slow disk the usual limit is too short to flush devices.
var aMinute = []string{"--freeze-limit", "60s"}

// newDriverOn starts one whose images lie on a filesystem of their own; pool is its type, and may be empty.
func newDriverOn(t *testing.T, pool string, native bool, args ...string) *testDriver {
	t.Helper()
	r := layOut(t, pool)
	if native {
		args = append(args, "--defer")
	}
	r.prepare(args...)
	r.start()
	return r
}

func layOut(t *testing.T, pool string) *testDriver {
	t.Helper()
	rig.Need(t, "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "blkid", "resize2fs", "xfs_growfs", "btrfs")
	dir := check.Value(os.MkdirTemp("/var/tmp", rig.Prefix("cd")))(t)
	r := &testDriver{t: t, dir: dir, data: dir + "/data"}
	if pool != "" {
		r.data = rig.Pool(t, pool, rig.Disk(t, poolSize, pool)) // not below dir, where a mount is one that was left
	}
	t.Cleanup(func() {
		if !t.Failed() && !r.leaves {
			r.wantNothing()
		}
		rig.UnmountAll(t, dir)
		for _, loop := range r.loops() { // left by a test that failed
			_ = loopdev.Detach(loop)
		}
		_ = os.RemoveAll(dir)
	})
	return r
}

// poolSize is that of a filesystem for images, which is made on a sparse file.
const poolSize = 4 << 30

func (r *testDriver) socket() string { return r.dir + "/csi.sock" }

// prepare makes its process, which is not started yet, and its clients.
func (r *testDriver) prepare(args ...string) {
	r.t.Helper()
	r.process, r.conn = rig.NewDriver(r.t, rig.Program(r.t, "crust-driver"), r.socket(), r.data, append([]string{"--node-id", "node-a", "--log-level", "debug"}, args...)...)
	r.ControllerClient, r.NodeClient, r.IdentityClient = csi.NewControllerClient(r.conn), csi.NewNodeClient(r.conn), csi.NewIdentityClient(r.conn)
	r.GroupControllerClient = csi.NewGroupControllerClient(r.conn)
}

// start starts the driver and waits until it serves.
func (r *testDriver) start(env ...string) {
	r.t.Helper()
	check.Must(r.t, r.process.Launch(env...))
	check.Must(r.t, r.process.WaitReady())
}

// wait waits for the end of a driver that is on its way there, and gives its exit code.
func (r *testDriver) wait() int {
	r.t.Helper()
	return check.Value(r.process.WaitEnd(time.Minute))(r.t)
}

// killed has the driver be killed at a failpoint in a call, and starts it again.
func (r *testDriver) killed(point string, call func() error) {
	r.t.Helper()
	r.restart("CRUST_FAILPOINTS=" + point + "=kill")
	check.Require(r.t, call() != nil, "%s: not hit", point)
	r.wait()
	r.start()
}

func (r *testDriver) restart(env ...string) {
	r.t.Helper()
	r.process.Kill()
	r.start(env...)
}

const (
	mib  = int64(1) << 20
	size = 320 * mib
)

// volume is the calls of one volume's life; each may be made again and again.
type volume struct {
	*testDriver
	name, id, staging, target string
	access                    *csi.VolumeCapability
}

func (r *testDriver) volume(name string, access *csi.VolumeCapability) *volume {
	r.t.Helper()
	for _, dir := range []string{"/staging/" + name, "/pods"} {
		check.Must(r.t, os.MkdirAll(r.dir+dir, 0o750))
	}
	return &volume{testDriver: r, name: name, staging: r.dir + "/staging/" + name, target: r.dir + "/pods/" + name, access: access}
}

func (v *volume) create() error { return v.createFrom(nil, size) }

func (v *volume) stage() error {
	return check.Err(v.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.access,
	}))
}

func (v *volume) request() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: v.access}
}

func (v *volume) publish() error {
	return check.Err(v.NodePublishVolume(v.t.Context(), v.request()))
}

func (v *volume) unpublish() error {
	return check.Err(v.NodeUnpublishVolume(v.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target}))
}

func (v *volume) unstage() error {
	return check.Err(v.NodeUnstageVolume(v.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging}))
}

func (v *volume) remove() error {
	return check.Err(v.DeleteVolume(v.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id}))
}

func (v *volume) must(calls ...func() error) {
	v.t.Helper()
	for _, call := range calls {
		check.Must(v.t, call())
	}
}

// upFrom makes a volume from another one or a snapshot, or from nothing.
func (v *volume) upFrom(source *csi.VolumeContentSource, bytes int64) {
	v.t.Helper()
	check.Must(v.t, v.createFrom(source, bytes))
	v.must(v.stage, v.publish)
}

func (v *volume) up()   { v.t.Helper(); v.must(v.create, v.stage, v.publish) }
func (v *volume) down() { v.t.Helper(); v.must(v.unpublish, v.unstage, v.remove) }

// wantNothing fails where anything of a volume is left.
func (r *testDriver) wantNothing() {
	r.t.Helper()
	for _, pattern := range []string{r.data + "/volumes/*", r.data + "/volumes/.n*", r.data + "/groups/*", r.data + "/groups/.n*", r.data + "/images/*", r.dir + "/pods/*"} {
		left, _ := filepath.Glob(pattern)
		check.That(r.t, len(left) == 0, "left: %v", left)
	}
	check.Empty(r.t, rig.MountPoints(r.dir), "still mounted")
	check.Empty(r.t, rig.LoopsLeft(r.data+"/images/"), "still attached")
}

// loops lists the loop devices over images of this driver.
func (r *testDriver) loops() []string {
	return slices.Collect(maps.Keys(rig.Loops(r.data + "/images/")))
}

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

// notOffered are csi-sanity's specs of what the driver does not advertise:
// publishing by a controller; the health calls of the controller and of storage, and
// topology of snapshots; the limit of attached volumes, which has no meaning without a controller that attaches;
// and the spec of pagination that csi-sanity itself has switched off (TestPagination has
// its place).
func notOffered() []string {
	return []string{
		"Controller Service [Controller Server] ControllerPublishVolume should fail when no node id is provided",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when no volume capability is provided",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when no volume id is provided",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when publishing more volumes than the node max attach limit",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when the node does not exist",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when the volume does not exist",
		"Controller Service [Controller Server] ControllerPublishVolume should fail when the volume is already published but is incompatible",
		"Controller Service [Controller Server] ControllerUnpublishVolume should fail when no volume id is provided",
		"Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted",
		"Controller Service [Controller Server] volume lifecycle should be idempotent",
		"Controller Service [Controller Server] volume lifecycle should work",
		"ControllerGetVolumeHealth [Controller Server] should fail when no volume id is provided",
		"ControllerGetVolumeHealth [Controller Server] should return health for a valid volume",
		"ControllerListVolumeHealth [Controller Server] should return appropriate response",
		"CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility requirements",
		"Node Service NodeGetStorageHealth should return appropriate response",
	}
}
