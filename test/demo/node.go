package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

const (
	diskSize   = 128 << 20
	driverName = rig.DriverName
)

// node is the demo's node: the daemon, the CSI driver behind it, and a
// PersistentVolume of that.
type node struct {
	t           rig.T
	daemon      *rig.Daemon
	driver      *rig.Fronted     // its registrar looks for crust-proxy where it would look for kubelet
	conn        *grpc.ClientConn // to the driver, through the daemon
	id, staging string           // of the volume
	disk        string           // of the volume, once it is published
}

// built is the directory with the programs that `make build` made; if there are none, the
// demo builds them.
func built() string {
	if bin, err := filepath.Abs("bin"); err == nil {
		if _, err := os.Stat(bin + "/crust-driver"); err == nil {
			return bin
		}
	}
	return ""
}

func newNode(t rig.T) *node {
	n := &node{t: t, daemon: rig.NewDaemon(t)}
	n.daemon.Programs = built()
	n.driver = rig.NewFronted(n.daemon, "policy: {rules: [{name: pods-in-sandboxes, drivers: ["+driverName+"], defer: true}]}")
	n.conn = n.daemon.Dial(n.driver.Front)
	n.staging = n.daemon.Kubelet + "/plugins/kubernetes.io/csi/" + driverName + "/data/globalmount"
	for _, dir := range []string{n.staging, n.daemon.Dir + "/etc"} {
		n.must(os.MkdirAll(dir, 0o750))
	}
	return n
}

func (n *node) must(err error) { check.Must(n.t, err) }

// start starts the daemon and waits until the driver answers through it.
func (n *node) start(ctx context.Context) {
	n.daemon.Start()
	check.Eventually(n.t, "the driver answers through crust-proxy", func() bool {
		n.must(ctx.Err())
		n.conn.ResetConnectBackoff()
		_, err := csi.NewIdentityClient(n.conn).Probe(ctx, &csi.ProbeRequest{})
		return err == nil
	})
}

func (n *node) csi() csi.NodeClient { return csi.NewNodeClient(n.conn) }

func (n *node) controller() csi.ControllerClient { return csi.NewControllerClient(n.conn) }

// crustctl runs the operator's tool.
func (n *node) crustctl(args ...string) string {
	out, err := n.daemon.Crustctl(args...).CombinedOutput()
	if err != nil {
		return string(out) + err.Error()
	}
	return string(out)
}

// target makes what kubelet makes of a pod's volume.
func (n *node) target(pod string) string {
	dir := filepath.Join(n.daemon.Kubelet, "pods", pod, "volumes", "kubernetes.io~csi", "data")
	n.must(os.MkdirAll(dir, 0o750))
	n.must(os.WriteFile(dir+"/vol_data.json", []byte(`{"driverName":"`+driverName+`"}`), 0o600))
	return dir + "/mount"
}

// create has the driver make the volume, as a provisioner does, and stage it, as
// kubelet does.
func (n *node) create(ctx context.Context) {
	reply, err := n.controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "data", CapacityRange: &csi.CapacityRange{RequiredBytes: diskSize}, VolumeCapabilities: []*csi.VolumeCapability{rig.MountAccess("ext4")},
	})
	n.must(err)
	n.id = reply.GetVolume().GetVolumeId()
	_, err = n.csi().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: n.id, StagingTargetPath: n.staging, VolumeCapability: rig.MountAccess("ext4")})
	n.must(err)
}

// publish is kubelet's call for a pod.
func (n *node) publish(ctx context.Context, target string) error {
	_, err := n.csi().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: n.id, StagingTargetPath: n.staging, TargetPath: target, VolumeCapability: rig.MountAccess("ext4"),
	})
	return err
}

func (n *node) unpublish(ctx context.Context, target string) error {
	_, err := n.csi().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: n.id, TargetPath: target})
	return err
}

// remove gives the volume back to the driver and has it deleted.
func (n *node) remove(ctx context.Context) error {
	_, err := n.csi().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: n.id, StagingTargetPath: n.staging})
	if err == nil {
		_, err = n.controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: n.id})
	}
	return err
}

// startSandbox starts what does as Kata's shim and guest do.
func (n *node) startSandbox(id, target string) *kata.Guest {
	s, err := kata.Boot(id, n.daemon.Kata, n.daemon.GoSandboxes, target)
	n.must(err)
	n.t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			n.t.Error(err)
		}
	})
	return s
}

// handedOver reads which device the sandbox will find.
func (n *node) handedOver(target string) {
	raw, err := os.ReadFile(filepath.Join(kata.VolumeDir(n.daemon.Kata, target), "mountInfo.json"))
	n.must(err)
	var info struct {
		Device string `json:"device"`
	}
	n.must(json.Unmarshal(raw, &info))
	n.disk = info.Device
	if _, attached := n.loops()[n.disk]; !attached {
		n.t.Fatalf("%s is no loop device over an image of the driver", n.disk)
	}
}

// loops are the loop devices over images of the driver.
func (n *node) loops() map[string]string { return rig.Loops(n.driver.Data + "/") }
