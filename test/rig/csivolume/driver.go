// Package csivolume has volumes of the reference driver as kubelet sees them: behind the
// front of a daemon.
package csivolume

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Driver is the reference driver, behind a daemon.
type Driver struct {
	*rig.Fronted

	Node       csi.NodeClient
	Controller csi.ControllerClient
	Group      csi.GroupControllerClient

	daemon *rig.Daemon
	conn   *grpc.ClientConn
}

// New prepares the driver, and a daemon with a policy, which is YAML.
func New(d *rig.Daemon, policy string, args ...string) *Driver {
	d.T.Helper()
	driver := &Driver{Fronted: rig.NewFronted(d, policy, append([]string{"--crust-proxy-socket", d.AdminSocket}, args...)...), daemon: d}
	driver.conn = d.Dial(driver.Front)
	driver.Node, driver.Controller = csi.NewNodeClient(driver.conn), csi.NewControllerClient(driver.conn)
	driver.Group = csi.NewGroupControllerClient(driver.conn)
	return driver
}

// Start starts the driver with further arguments, and then the daemon, which defers all
// volumes.
func Start(t rig.T, d *rig.Daemon, args ...string) *Driver {
	t.Helper()
	driver := New(d, "policy: {rules: [{name: all, defer: true}]}", args...)
	check.Must(t, driver.Process.Launch())
	d.Start()
	driver.Wait(t)
	return driver
}

// Wait waits until the driver answers through the front.
func (d *Driver) Wait(t rig.T) {
	t.Helper()
	check.Eventually(t, "the driver answers through the front", func() bool {
		check.Must(t, t.Context().Err())
		d.conn.ResetConnectBackoff()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := d.Node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		return err == nil
	})
}
