package csivolume

import (
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// DriverName is that of crust-driver, unless it is given another one.
const DriverName = "driver.crust-proxy.dev"

// Driver is crust-driver behind the front of a daemon.
type Driver struct {
	*Client

	Process *rig.Process
	// Data has its images, Registry its registration socket.
	Data, Registry string
	// Socket is where it serves, and Front where the daemon does in its place. The daemon
	// reaches it through a relay of rig.ServeVendors.
	Socket, Front string
}

// New lays out kubelet's directories and the driver's, and has the daemon run its front by a policy, which is YAML.
func New(d *rig.Daemon, policy string, args ...string) *Driver {
	d.T.Helper()
	d.Extra = "front: {enabled: true}\n" + policy
	driver := &Driver{
		Data: d.Dir + "/data", Registry: d.Kubelet + "/crust-proxy/registry",
		Socket: d.Kubelet + "/plugins/" + DriverName + "/csi.sock", Front: d.Dir + "/run/csi/" + DriverName + ".sock",
	}
	for _, dir := range []string{driver.Data, driver.Registry, d.Kubelet + "/plugins_registry", filepath.Dir(driver.Socket)} {
		check.Must(d.T, os.MkdirAll(dir, 0o755)) //nolint:gosec // as on a node
	}
	driver.Process, _ = rig.NewDriver(d.T, d.Program("crust-driver"), driver.Socket, driver.Data, append([]string{
		"--node-id", "node-1", "--capacity", "100000000000", "--crust-proxy-socket", d.AdminSocket,
		"--kubelet-registration-socket", driver.Registry + "/" + DriverName + "-reg.sock", "--kubelet-endpoint", driver.Socket + ".vendors",
	}, args...)...)
	rig.ServeVendors(d.T, driver.Socket, driver.Socket+".vendors")
	driver.Client = NewClient(d.Dial(driver.Front), DriverName, d.Kubelet)
	return driver
}

// Start starts the driver with further arguments, and then the daemon, which defers all volumes.
func Start(t rig.T, d *rig.Daemon, args ...string) *Driver {
	t.Helper()
	driver := New(d, "policy: {rules: [{name: all, defer: true}]}", args...)
	check.Must(t, driver.Process.Launch())
	d.Start()
	driver.Wait(t)
	return driver
}
