//go:build system

package package_test

import (
	"path/filepath"
	"time"

	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

const (
	kubeletRoot = "/var/lib/kubelet"
	pluginDir   = kubeletRoot + "/plugins_registry"
	driverName  = csivolume.DriverName
	csiSocket   = "/run/crust-proxy/csi/" + driverName + ".sock"
	podUID      = "5d1c7a52-3f0e-4a3a-8f9b-6c2b1f0f4a77"
	kataVolumes = "/run/kata-containers/shared/direct-volumes"
)

// register does what kubelet does with a socket that comes to its folder, and gives the socket.
func (m *machine) register() string {
	m.t.Helper()
	var path string
	m.wait("register the driver", func() bool {
		found, _ := filepath.Glob(m.path(pluginDir) + "/*.sock")
		if len(found) == 1 {
			path = pluginDir + "/" + filepath.Base(found[0])
		}
		return len(found) == 1
	})
	ctx := check.Within(m.t, time.Minute)
	plugin := registration.NewRegistrationClient(m.dial(path))
	info := check.Value(plugin.GetInfo(ctx, &registration.InfoRequest{}))(m.t)
	check.Require(m.t, info.GetType() == registration.CSIPlugin && info.GetName() == driverName && info.GetEndpoint() == csiSocket,
		"registered as %v", info)
	check.Must(m.t, check.Err(plugin.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})))
	return path
}

// volume is a PersistentVolume as kubelet knows it.
type volume = csivolume.Volume

// create has the driver make a volume, through the front, for the pod.
func (f *frontService) create(fsType string) *volume {
	f.t.Helper()
	v := f.driver.Create(f.t, "pv-"+fsType, fsType, 400<<20)
	v.For(podUID)
	return v
}

// handedOver is the device that the sandbox is told of.
func (f *frontService) handedOver(v *volume) string {
	f.t.Helper()
	device, fs, err := kata.HandedOver(f.path(kataVolumes), v.Target)
	check.Must(f.t, err)
	check.That(f.t, fs == v.FS, "the sandbox is told to mount %q, want %q", fs, v.FS)
	return device
}
