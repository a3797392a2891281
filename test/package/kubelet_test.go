//go:build system

package package_test

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

const (
	kubeletRoot = "/var/lib/kubelet"
	pluginDir   = kubeletRoot + "/plugins_registry"
	driverName  = rig.DriverName
	csiSocket   = "/run/crust-proxy/csi/" + driverName + ".sock"
	podUID      = "5d1c7a52-3f0e-4a3a-8f9b-6c2b1f0f4a77"
	kataVolumes = "/run/kata-containers/shared/direct-volumes"
)

// register does what kubelet does with a socket that comes to its folder, and
// gives the socket.
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
	ctx, cancel := context.WithTimeout(m.t.Context(), 10*time.Second)
	defer cancel()
	plugin := registration.NewRegistrationClient(m.dial(path))
	info, err := plugin.GetInfo(ctx, &registration.InfoRequest{})
	check.Must(m.t, err)
	if info.GetType() != registration.CSIPlugin || info.GetName() != driverName || info.GetEndpoint() != csiSocket {
		m.t.Fatalf("registered as %v", info)
	}
	_, err = plugin.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})
	check.Must(m.t, err)
	return path
}

// volume is a PersistentVolume as kubelet knows it.
type volume struct {
	id, fs  string
	context map[string]string
}

func (v *volume) capability() *csi.VolumeCapability { return rig.MountAccess(v.fs) }

func (v *volume) staging() string {
	return kubeletRoot + "/plugins/kubernetes.io/csi/" + driverName + "/pv-" + v.fs + "/globalmount"
}

func (v *volume) target() string {
	return kubeletRoot + "/pods/" + podUID + "/volumes/kubernetes.io~csi/pv-" + v.fs + "/mount"
}

// create has the driver make a volume, through the front.
func (f *frontService) create(fsType string) *volume {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	v := &volume{fs: fsType}
	reply, err := f.controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "pv-" + fsType, CapacityRange: &csi.CapacityRange{RequiredBytes: 400 << 20}, VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
	})
	check.Must(f.t, err)
	v.id, v.context = reply.GetVolume().GetVolumeId(), reply.GetVolume().GetVolumeContext()
	return v
}

func (f *frontService) stage(v *volume) {
	f.t.Helper()
	check.Must(f.t, os.MkdirAll(f.path(v.staging()), 0o750))
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	_, err := f.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(), VolumeCapability: v.capability(), VolumeContext: v.context,
	})
	check.Must(f.t, err)
}

func (f *frontService) publish(v *volume) error {
	if err := os.MkdirAll(f.path(filepath.Dir(v.target())), 0o750); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	_, err := f.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging(), TargetPath: v.target(), VolumeCapability: v.capability(), VolumeContext: v.context,
	})
	return err
}

// takeAway is all that kubelet does with a volume when its last pod has gone, and
// then a provisioner, when its claim has.
func (f *frontService) takeAway(v *volume) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	_, err := f.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target()})
	check.Must(f.t, err)
	_, err = f.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging()})
	check.Must(f.t, err)
	for _, dir := range []string{v.target(), v.staging()} {
		if err := os.Remove(f.path(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			f.t.Errorf("kubelet cannot remove %s: %v", dir, err)
		}
	}
	_, err = f.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	check.Must(f.t, err)
}

// handedOver is the device that the sandbox is told of.
func (f *frontService) handedOver(v *volume) string {
	f.t.Helper()
	raw, err := os.ReadFile(f.path(filepath.Join(kata.VolumeDir(kataVolumes, v.target()), "mountInfo.json")))
	check.Must(f.t, err)
	var info struct {
		Device string `json:"device"`
		FSType string `json:"fstype"`
	}
	check.Must(f.t, json.Unmarshal(raw, &info))
	if info.FSType != v.fs {
		f.t.Errorf("the sandbox is told to mount %q, want %q", info.FSType, v.fs)
	}
	return info.Device
}
