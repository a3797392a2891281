package main

import (
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// nodeCalls compares the four node calls of a volume with an ext4: its driver mounts it on the host,
// or it is deferred, by raw block access (way B) or by the driver itself.
func nodeCalls(r *testbed) {
	r.build("crust-driver")
	r.daemon.Extra = "front: {enabled: true}\npolicy: {rules: [{name: all, defer: true}]}"
	block, native := r.crustDriver("block.bench.crust-proxy.dev"), r.crustDriver("native.bench.crust-proxy.dev", "--defer")
	r.daemon.Start()
	ways := []*csivolume.Volume{r.formatted(block.direct, "host"), r.formatted(block.front, "block"), r.formatted(native.front, "native")}
	measure := func(what string) {
		var calls []func() error
		for _, v := range ways {
			calls = append(calls, func() error { return lifeOf(r, v) })
		}
		took := r.timed(r.set.scale(20), 10, calls...)
		host, byBlock, byDriver := median(took[0]), median(took[1]), median(took[2])
		r.sheet.tell("stage, publish, unpublish and unstage of an ext4 that the driver mounts on the host, p50"+what, micros(host))
		r.sheet.ratio("the same, deferred by raw block access", "<= 0.35x", byBlock, host, 0.35)
		r.sheet.ratio("the same, deferred by the driver", "<= 0.25x", byDriver, host, 0.25)
	}
	measure("")
	openFiles(r.t)
	measure(", beside 50,000 more open descriptors")
}

// crustDriver is a driver by its own socket and through the front.
type crustDriver struct{ direct, front *csivolume.Client }

func (r *testbed) crustDriver(name string, args ...string) crustDriver {
	socket, registry := r.daemon.Kubelet+"/plugins/"+name+"/csi.sock", r.daemon.Kubelet+"/crust-proxy/registry"
	data := filepath.Join(r.daemon.Dir, "data-"+name)
	for _, dir := range []string{filepath.Dir(socket), registry, data, r.daemon.Kubelet + "/plugins_registry"} {
		r.must(os.MkdirAll(dir, 0o755)) //nolint:gosec // as on a node
	}
	process, conn := rig.NewDriver(r.t, r.daemon.Program("crust-driver"), socket, data, append([]string{
		"--node-id", "node-1", "--driver-name", name, "--capacity", "100000000000",
		"--kubelet-registration-socket", registry + "/" + name + "-reg.sock", "--kubelet-endpoint", socket,
	}, args...)...)
	r.must(process.Start())
	through := r.daemon.Dir + "/run/csi/" + name + ".sock"
	return crustDriver{csivolume.NewClient(conn, name, r.daemon.Kubelet), csivolume.NewClient(r.daemon.Dial(through), name, r.daemon.Kubelet)}
}

// formatted makes a volume and has it used once, which formats it.
func (r *testbed) formatted(c *csivolume.Client, name string) *csivolume.Volume {
	v := c.Create(r.t, name, "ext4", 256<<20)
	v.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	r.must(lifeOf(r, v))
	return v
}

// lifeOf is all four calls.
func lifeOf(r *testbed, v *csivolume.Volume) error {
	v.Publish()
	if err := v.TearDown(); err != nil {
		return err
	}
	_, err := v.Node.NodeUnstageVolume(r.ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging})
	return err
}
