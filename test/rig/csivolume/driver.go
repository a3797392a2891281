// Package csivolume has volumes of the reference driver as kubelet sees them: behind the
// front of a daemon.
package csivolume

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// DriverName is the reference driver's.
const DriverName = "driver.crust-proxy.dev"

// Front is configuration of a daemon that defers all volumes of CSI drivers.
const Front = "front: {enabled: true}\npolicy: {rules: [{name: all, defer: true}]}"

// Driver is the reference driver, behind a daemon.
type Driver struct {
	Process    *rig.Process
	Node       csi.NodeClient
	Controller csi.ControllerClient

	daemon *rig.Daemon
	conn   *grpc.ClientConn
}

// Start starts the driver with further arguments, and then the daemon, whose
// configuration includes Front.
func Start(t rig.T, d *rig.Daemon, args ...string) *Driver {
	t.Helper()
	socket := d.Kubelet + "/plugins/" + DriverName + "/csi.sock"
	registry := d.Kubelet + "/crust-proxy/registry"
	for _, dir := range []string{d.Dir + "/data", registry, d.Kubelet + "/plugins_registry", filepath.Dir(socket)} {
		check.Must(t, os.MkdirAll(dir, 0o755)) //nolint:gosec // as kubelet's
	}
	process := &rig.Process{Name: "the driver", Program: d.Program("crust-driver"), LogFile: d.Dir + "/log/driver", Args: append([]string{
		"--endpoint", "unix://" + socket, "--data-dir", d.Dir + "/data", "--node-id", "node-1", "--capacity", "100000000000",
		"--kubelet-registration-socket", registry + "/" + DriverName + "-reg.sock", "--kubelet-endpoint", socket,
		"--crust-proxy-socket", d.AdminSocket,
	}, args...)}
	t.Cleanup(process.Kill)
	check.Must(t, process.Launch())
	conn := d.Dial(d.Dir + "/run/csi/" + DriverName + ".sock")
	driver := &Driver{Process: process, Node: csi.NewNodeClient(conn), Controller: csi.NewControllerClient(conn), daemon: d, conn: conn}
	d.Start()
	driver.wait(t)
	return driver
}

// wait waits until the driver answers through the front.
func (d *Driver) wait(t rig.T) {
	t.Helper()
	check.Eventually(t, "the driver answers through the front", func() bool {
		d.conn.ResetConnectBackoff()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := d.Node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err == nil
	})
}
