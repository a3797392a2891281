// Package csivolume makes the calls of kubelet, and of the sidecars beside a driver, for volumes of a CSI driver.
package csivolume

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Client calls a driver.
type Client struct {
	// Conn leads to the driver, or to the front of a daemon before it.
	Conn       *grpc.ClientConn
	Node       csi.NodeClient
	Controller csi.ControllerClient
	Group      csi.GroupControllerClient
	// Driver is the driver's name.
	Driver string
	// Kubelet is kubelet's directory as the driver sees it, and Host what is before it here.
	Kubelet, Host string
}

// NewClient calls a driver on a node.
func NewClient(conn *grpc.ClientConn, name, kubelet string) *Client {
	return &Client{
		Conn: conn, Driver: name, Kubelet: kubelet,
		Node: csi.NewNodeClient(conn), Controller: csi.NewControllerClient(conn), Group: csi.NewGroupControllerClient(conn),
	}
}

// Served tells whether the driver answers. Its capabilities would not tell: the front knows the last ones.
func (c *Client) Served() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := c.Node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return err
}

// Wait waits until the driver answers.
func (c *Client) Wait(t rig.T) {
	t.Helper()
	check.Succeeds(t, "the driver answers", func() error {
		check.Must(t, t.Context().Err())
		return c.Served()
	})
}

// Volume is one that the driver has, or gets with its first publish.
func (c *Client) Volume(t rig.T, name, fs string) *Volume {
	v := &Volume{
		Client: c, T: t, Name: name, FS: fs, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		Staging: c.Kubelet + "/plugins/kubernetes.io/csi/" + c.Driver + "/" + name + "/globalmount",
	}
	v.For("pod-" + name)
	return v
}

// Create has the driver make a volume.
func (c *Client) Create(t rig.T, name, fs string, size int64) *Volume {
	t.Helper()
	v := c.Volume(t, name, fs)
	c.Wait(t)
	reply := check.Value(c.Controller.CreateVolume(context.Background(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{v.Access()},
	}))(t)
	v.ID, v.Context = reply.GetVolume().GetVolumeId(), reply.GetVolume().GetVolumeContext()
	return v
}
