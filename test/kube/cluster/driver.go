package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// The drivers that a node has, all at once: each is crust-driver, and the name of its StorageClass, too.
const (
	// Block is an unmodified driver behind crust-proxy: what is deferred, it publishes as a raw block volume.
	Block = "block.example.com"
	// Native is a driver behind crust-proxy that defers by itself.
	Native = "native.example.com"
	// Plain is registered with kubelet directly, as if crust-proxy were not there.
	Plain = "plain.example.com"
)

// Driver is one CSI driver's node plugin and controller, with its registrar
// beside it. Its process may be stopped, killed and started again.
type Driver struct {
	Process *rig.Process
	// Registrar is the sidecar. It is one of its own: killing the driver leaves it.
	Registrar *kubelet.Registrar
	Vendors   *rig.Vendors // nil for Plain
	// Socket is where the driver itself serves.
	Socket string
	conn   *grpc.ClientConn
}

// newDriver lays out a driver. Its registrar goes to a registry, kubelet's or crust-proxy's.
func (c *Cluster) newDriver(program, name, registry string, flags ...string) *Driver {
	d := &Driver{Socket: filepath.Join(KubeletRoot, "plugins", name, "csi.sock")}
	for _, dir := range []string{filepath.Dir(d.Socket), registry} {
		check.Must(c.t, os.MkdirAll(dir, 0o750))
	}
	d.Process, d.conn = rig.NewDriver(c.t, program, d.Socket, c.dataDir(name), append([]string{
		"--node-id", NodeName, "--driver-name", name, "--capacity", "1000000000000", "--log-level", c.logLevel,
		"--crust-proxy-socket", AdminSocket,
	}, flags...)...)
	d.Process.Name, d.Process.LogFile = name, c.Dir+"/"+name+".log"
	endpoint := d.Socket
	if name != Plain {
		endpoint += ".vendors"
		d.Vendors = rig.ServeVendors(c.t, d.Socket, endpoint)
	}
	d.Registrar = &kubelet.Registrar{Dir: registry, Name: name, Endpoint: endpoint, Restart: time.Second}
	return d
}

func (c *Cluster) dataDir(driver string) string { return filepath.Join(c.Dir, "data", driver) }

// Controller is the driver's, asked directly, as its sidecars do.
func (d *Driver) Controller() csi.ControllerClient { return csi.NewControllerClient(d.conn) }

// waitDrivers waits until kubelet has the drivers.
func (c *Cluster) waitDrivers() error {
	return eventually("kubelet registers the drivers", func(ctx context.Context) error {
		node, err := c.Client.StorageV1().CSINodes().Get(ctx, NodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(node.Spec.Drivers) != len(c.Drivers) {
			return fmt.Errorf("it has %d of %d", len(node.Spec.Drivers), len(c.Drivers))
		}
		return nil
	})
}
