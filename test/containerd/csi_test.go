//go:build system

package containerd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const driverName = "driver.crust-proxy.dev"

// csiVolume is a volume of the reference driver, as kubelet sees it: behind the
// front.
type csiVolume struct {
	*testNode
	node            csi.NodeClient
	controller      csi.ControllerClient
	id, fs, pod     string
	staging, target string
	context         map[string]string
}

// newCSINode makes a node whose daemon stands in front of the reference driver.
func newCSINode(t *testing.T, version string, args ...string) *testNode {
	t.Helper()
	r := layOut(t, version)
	r.d.Extra = "front: {enabled: true}\npolicy: {rules: [{name: all, defer: true}]}"
	socket := r.d.Kubelet + "/plugins/" + driverName + "/csi.sock"
	registry := r.d.Kubelet + "/crust-proxy/registry"
	r.data = r.d.Dir + "/data"
	for _, dir := range []string{r.data, registry, r.d.Kubelet + "/plugins_registry", filepath.Dir(socket)} {
		check.Must(t, os.MkdirAll(dir, 0o755))
	}
	r.driver = &rig.Process{
		Name: "crust-driver", Program: rig.Program(t, "crust-driver"), LogFile: r.d.Dir + "/log/crust-driver", Args: append([]string{
			"--endpoint", "unix://" + socket, "--data-dir", r.data, "--node-id", "node-1", "--capacity", "100000000000",
			"--kubelet-registration-socket", registry + "/" + driverName + "-reg.sock", "--kubelet-endpoint", socket,
			"--crust-proxy-socket", r.d.AdminSocket,
		}, args...),
	}
	check.Must(t, r.driver.Start())
	t.Cleanup(func() {
		r.driver.Kill()
		if t.Failed() {
			t.Logf("log of the driver:\n%s", rig.Tail(r.driver.Log()))
		}
	})
	r.d.Start()
	return r
}

// newSnapshotNode makes one where data is shared, so that volumes in use have snapshots.
func newSnapshotNode(t *testing.T, args ...string) *testNode {
	t.Helper()
	images := t.TempDir()
	check.Must(t, unix.Mount(rig.Disk(t, 8<<30, "xfs"), images, "xfs", 0, ""))
	t.Cleanup(func() { check.Must(t, unix.Unmount(images, 0)) })
	r := newCSINode(t, "installed", append([]string{"--data-dir", images}, args...)...)
	r.data = images
	return r
}

// create has the driver make a volume for a pod of its own.
func (r *testNode) create(name, fs string, size int64) *csiVolume {
	r.t.Helper()
	return r.createFor("pod-"+name, name, fs, size, nil)
}

// createFor has the driver make a volume, perhaps from a snapshot, once it answers through
// the front.
func (r *testNode) createFor(pod, name, fs string, size int64, from *csi.VolumeContentSource) *csiVolume {
	r.t.Helper()
	v := &csiVolume{
		testNode: r, fs: fs, pod: pod,
		staging: r.d.Kubelet + "/plugins/kubernetes.io/csi/" + driverName + "/" + name + "/globalmount",
		target:  r.d.Kubelet + "/pods/" + pod + "/volumes/kubernetes.io~csi/" + name + "/mount",
	}
	conn := r.throughFront()
	v.node, v.controller = csi.NewNodeClient(conn), csi.NewControllerClient(conn)
	reply, err := v.controller.CreateVolume(r.ctx(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
		VolumeContentSource: from,
	})
	check.Must(r.t, err)
	v.id, v.context = reply.GetVolume().GetVolumeId(), reply.GetVolume().GetVolumeContext()
	return v
}

// throughFront waits until the driver answers through the front.
func (r *testNode) throughFront() *grpc.ClientConn {
	r.t.Helper()
	conn := r.d.Dial(r.d.Dir + "/run/csi/" + driverName + ".sock")
	node := csi.NewNodeClient(conn)
	check.Eventually(r.t, "the driver answers through the front", func() bool {
		conn.ResetConnectBackoff()
		_, err := node.NodeGetCapabilities(r.ctx(), &csi.NodeGetCapabilitiesRequest{})
		return err == nil
	})
	return conn
}

func (v *csiVolume) capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.fs}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// publish is all that kubelet calls before it makes a sandbox.
func (v *csiVolume) publish() {
	v.t.Helper()
	check.Must(v.t, os.MkdirAll(v.staging, 0o750))
	_, err := v.node.NodeStageVolume(v.ctx(), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.capability(), VolumeContext: v.context,
	})
	check.Must(v.t, err)
	check.Must(v.t, os.MkdirAll(filepath.Dir(v.target), 0o750))
	check.Must(v.t, os.WriteFile(filepath.Dir(v.target)+"/vol_data.json", []byte(`{"driverName":"`+driverName+`"}`), 0o600))
	with := map[string]string{"csi.storage.k8s.io/pod.uid": v.pod}
	for key, value := range v.context {
		with[key] = value
	}
	_, err = v.node.NodePublishVolume(v.ctx(), &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: v.capability(), VolumeContext: with,
	})
	check.Must(v.t, err)
}

// unpublish is all that kubelet calls after it has removed the sandbox.
func (v *csiVolume) unpublish() {
	v.t.Helper()
	check.Eventually(v.t, "unpublish", func() bool {
		_, err := v.node.NodeUnpublishVolume(v.ctx(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
		if code := status.Code(err); err != nil && code != codes.Aborted && code != codes.Unavailable {
			v.t.Fatal(err)
		}
		return err == nil
	})
	if err := os.Remove(v.target); err != nil && !errors.Is(err, os.ErrNotExist) {
		v.t.Errorf("kubelet cannot remove the target: %v", err)
	}
	_, err := v.node.NodeUnstageVolume(v.ctx(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	check.Must(v.t, err)
	check.Must(v.t, os.RemoveAll(filepath.Dir(v.target)))
	_, err = v.controller.DeleteVolume(v.ctx(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	check.Must(v.t, err)
}

// grow has the driver grow the device, and kubelet the filesystem.
func (v *csiVolume) grow(size int64) error {
	limit := &csi.CapacityRange{RequiredBytes: size}
	_, err := v.controller.ControllerExpandVolume(v.ctx(), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: limit, VolumeCapability: v.capability(),
	})
	check.Must(v.t, err)
	reply, err := v.node.NodeExpandVolume(v.ctx(), &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: v.target, StagingTargetPath: v.staging, VolumeCapability: v.capability(), CapacityRange: limit,
	})
	if err == nil && reply.GetCapacityBytes() < size {
		v.t.Errorf("it was grown to %d, not %d", reply.GetCapacityBytes(), size)
	}
	return err
}

// wantNoGrowth wants a growth to leave the record once it is done. Stats show that.
func (v *csiVolume) wantNoGrowth() {
	v.t.Helper()
	check.Eventually(v.t, "no growth is pending", func() bool {
		_, err := v.node.NodeGetVolumeStats(v.ctx(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target})
		check.Must(v.t, err)
		shown, err := v.d.Admin().GetVolume(v.ctx(), &adminv1.GetVolumeRequest{Volume: v.target})
		check.Must(v.t, err)
		return shown.GetVolume().GetGrowToBytes() == 0
	})
}

// wantStats wants kubelet to hear what df tells inside.
func (v *csiVolume) wantStats(container string) usage {
	v.t.Helper()
	var inside usage
	check.Eventually(v.t, "stats are what df tells", func() bool {
		reply, err := v.node.NodeGetVolumeStats(v.ctx(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target})
		if err != nil || len(reply.GetUsage()) == 0 {
			return false
		}
		inside = v.df(container)
		bytes := reply.GetUsage()[0]
		return bytes.GetUnit() == csi.VolumeUsage_BYTES && bytes.GetTotal() == inside.bytesTotal &&
			bytes.GetUsed() == inside.bytesUsed && bytes.GetAvailable() == inside.bytesAvailable
	})
	return inside
}

// TestCSIVolumeInAPod takes a volume of a CSI driver through everything that
// kubelet does with it and its pod.
func TestCSIVolumeInAPod(t *testing.T) {
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		t.Run(name, func(t *testing.T) {
			r := newCSINode(t, "installed", args...)
			for _, fs := range filesystems {
				t.Run(fs, func(t *testing.T) { r.of(t).lifeOfACSIVolume(fs) })
			}
			r.wantClean()
		})
	}
}

func (r *testNode) lifeOfACSIVolume(fs string) {
	r.t.Helper()
	v := r.create("pv-"+fs, fs, diskSize)
	v.publish()
	// Kubelet expands before there is a sandbox, and starts no pod where that fails.
	check.Must(r.t, v.grow(2*diskSize))
	pod := r.pod(v.pod)
	id := r.run(pod, "main", at(v.target))
	if has := v.wantStats(id); has.bytesTotal < 2*diskSize*8/10 {
		r.t.Errorf("the filesystem has %d bytes after it was grown before its mount", has.bytesTotal)
	}
	if fs != "xfs" { // that leaves its superblock in the log, for a minute or two
		v.wantNoGrowth()
	}
	r.exec(id, "echo kept > /data/file && sync")
	err := v.grow(3 * diskSize)
	if rig.MayGrow(r.t, fs) {
		check.Must(r.t, err)
		if has := v.wantStats(id); has.bytesTotal < 3*diskSize*8/10 {
			r.t.Errorf("the filesystem has %d bytes after it was grown", has.bytesTotal)
		}
	} else if err == nil || !strings.Contains(err.Error(), "operation not permitted") {
		r.t.Errorf("without the right to grow: %v", err)
	}
	v.publish() // kubelet was restarted
	if got := r.exec(id, "cat /data/file"); got != "kept\n" {
		r.t.Errorf("it reads %q", got)
	}
	v.wantStats(id)
	r.remove(pod)
	v.unpublish()
}
