package oci_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
)

// vm stands for what a shim has of its virtual machine.
type vm struct{}

// attach opens a block device of the host, refuses any but the one of the volume, and plugs it in. It gives its name
// in the guest.
func (vm) attach(info abi.Info) (string, error) {
	major, minor, _, err := info.DeviceNumber()
	if err == nil && (major != 259 || minor != 3) { // what fstat(2) says of the descriptor
		err = fmt.Errorf("%s is not the device %d:%d", info.Device, major, minor)
	}
	return "/dev/vdb", err
}

// mount has the guest's agent mount a device with what the volume asks for, and
// gives the place in the guest of the volume's sub-directory.
func (vm) mount(device, key, sub string, info abi.Info) (string, error) {
	gid, grouped, err := info.Group()
	if err != nil {
		return "", err
	}
	fmt.Printf("guest: mount -t %s -o %v %s; grow it; group: %v %d %s\n",
		info.FSType, info.Options, device, grouped, gid, info.GroupPolicy())
	return filepath.Join("/run/volumes", key, sub), nil
}

// createContainer is the part of a shim that this package is for.
func createContainer(cfg oci.Config, guest vm, spec *specs.Spec) error {
	sandbox, known := oci.SandboxOf(spec)
	found, err := oci.Find(cfg, spec, sandbox.PodUID)
	if err != nil {
		return err // the container must not be created
	}
	defer func() {
		for _, m := range found {
			_ = m.Close()
		}
	}()
	if len(found) > 0 && (!known || sandbox.Self) {
		return errors.New("only a container in a sandbox can have a deferred volume")
	}
	for _, m := range found {
		device, err := guest.attach(m.Info)
		if err != nil {
			return err
		}
		inGuest, err := guest.mount(device, m.Volume, m.Sub, m.Info)
		if err != nil {
			return err
		}
		spec.Mounts[m.Index].Source = inGuest
		if err := m.Bind(oci.Binding{Sandbox: sandbox.ID, Program: "/usr/bin/my-shim", Socket: "/run/my-shim/volumes.sock"}); err != nil {
			return err
		}
	}
	return nil
}

// A shim of a virtual machine plugs in the devices of the deferred volumes among a
// container's mounts, has the guest mount them, and tells the broker.
func Example() {
	root, spec, remove := exampleNode()
	defer remove()
	spec.Annotations["io.kubernetes.cri.container-type"] = "sandbox"
	fmt.Println("sandbox:", createContainer(oci.Config{Root: root}, vm{}, spec))
	delete(spec.Annotations, "io.kubernetes.cri.container-type")
	if err := createContainer(oci.Config{Root: root}, vm{}, spec); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("container:", filepath.Base(spec.Mounts[1].Source), "at", spec.Mounts[1].Destination)
	files, _ := filepath.Glob(root + "/*/*")
	for _, file := range files {
		fmt.Println("broker sees:", filepath.Base(file))
	}
	// Output:
	// sandbox: only a container in a sandbox can have a deferred volume
	// guest: mount -t ext4 -o [noatime] /dev/vdb; grow it; group: true 2000 OnRootMismatch
	// container: logs at /data
	// broker sees: mountInfo.json
	// broker sees: runtime-cli
	// broker sees: runtime-socket
	// broker sees: sandbox1
}

// exampleNode is a node on which the broker has published one volume, and a
// container that mounts a sub-directory of it.
func exampleNode() (root string, spec *specs.Spec, remove func()) {
	const pod = "5d0a6c6e-0d3f-4b52-8f0c-7e8b8b3c3f11"
	dir, _ := os.MkdirTemp("", "example")
	target := filepath.Join(dir, "mount")
	root = filepath.Join(dir, "crust")
	info, _ := json.Marshal(abi.Info{
		VolumeType: "block", Device: "/dev/nvme1n1", FSType: "ext4", Options: []string{"noatime"},
		Metadata: map[string]string{
			"crust.targetPath": target, "crust.podUID": pod, "crust.device": "259:3",
			"fsGroup": "2000", "fsGroupChangePolicy": "OnRootMismatch",
		},
	})
	volume := filepath.Join(root, abi.DirName(target))
	_ = os.MkdirAll(volume, 0o700)
	_ = os.MkdirAll(filepath.Join(target, "logs"), 0o700)
	_ = os.WriteFile(filepath.Join(volume, abi.InfoName), info, 0o600)
	return root, &specs.Spec{
		Annotations: map[string]string{
			"io.kubernetes.cri.sandbox-id": "sandbox1", "io.kubernetes.cri.sandbox-uid": pod,
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/data", Type: "bind", Source: filepath.Join(target, "logs"), Options: []string{"rbind", "rw"}},
		},
	}, func() { _ = os.RemoveAll(dir) }
}
