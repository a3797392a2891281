package csidefer_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
)

// tinyDriver is a node plugin whose volumes are disks below /dev/disk/by-id.
type tinyDriver struct {
	csi.UnimplementedNodeServer
}

func (tinyDriver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil // what the driver has besides
}

func (tinyDriver) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	device := filepath.Join("/dev/disk/by-id", filepath.Base(req.GetVolumeId()))
	reply := &csi.NodePublishVolumeResponse{}
	if csidefer.Requested(req) {
		mount := req.GetVolumeCapability().GetMount()
		csidefer.Respond(reply, csidefer.Mount{Device: device, FSType: mount.GetFsType(), Flags: mount.GetMountFlags()})
		return reply, nil
	}
	// Here the driver mounts the device, as it always did.
	return reply, nil
}

// A driver reports that it can leave the filesystem to the pod's sandbox, and answers what the sandbox shall mount.
func Example() {
	server := grpc.NewServer(csidefer.ServerOption(csidefer.Options{}))
	csi.RegisterNodeServer(server, tinyDriver{})

	dir, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	listener, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
	if err != nil {
		fmt.Println(err)
		return
	}
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	// The rest is what its caller does: crust-proxy, or a kubelet that knows.
	conn, err := grpc.NewClient("unix:"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = conn.Close() }()
	req := &csi.NodePublishVolumeRequest{
		VolumeId: "disk-1",
		VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: []string{"noatime"}},
		}},
	}
	csidefer.SetRequested(req)
	reply, err := csi.NewNodeClient(conn).NodePublishVolume(context.Background(), req)
	if err != nil {
		fmt.Println(err)
		return
	}
	mount, given, err := csidefer.DeferredMount(reply)
	fmt.Println(given, err, mount.GetVolumeBackingPath(), mount.GetFsType(), mount.GetMountFlags())
	// Output: true <nil> /dev/disk/by-id/disk-1 ext4 [noatime]
}
