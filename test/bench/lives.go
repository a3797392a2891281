package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// livesSize is a volume's size: xfs needs 300 MiB.
const livesSize = 512 << 20

// lives compares the four node calls of a volume: its driver mounts it on the host without crust-proxy
// and behind it, or it is deferred, by raw block access (way B) or by the driver itself.
func lives(r *testbed) {
	r.build("crust-driver")
	const block, native = "block.bench.crust-proxy.dev", "native.bench.crust-proxy.dev"
	r.daemon.Extra = "front: {enabled: true}\npolicy: {rules: [{name: some, drivers: [" + block + ", " + native + "], defer: true}]}"
	plain, byBlock, byDriver := r.crustDriver("plain.bench.crust-proxy.dev"), r.crustDriver(block), r.crustDriver(native, "--defer")
	r.daemon.Start()
	clients := []*csivolume.Client{plain.direct, byBlock.front, byDriver.front, plain.front}
	for _, fs := range []string{"ext4", "xfs"} {
		livesOf(r, clients, fs, "formatted", r.set.scale(100), formatted)
		if !r.set.check { // mkfs is most of it, in each way
			livesOf(r, clients, fs, "blank", r.set.scale(30), blank)
		}
	}
	openFiles(r.t)
	livesOf(r, clients, "ext4", "formatted, beside 50,000 more open descriptors", r.set.scale(60), formatted)
}

// livesOf measures one kind of volume with each of the clients, and what is left to the guest.
func livesOf(r *testbed, clients []*csivolume.Client, fs, state string, rounds int, of func(r *testbed, c *csivolume.Client, name, fs string) func() time.Duration) {
	disk := rig.Disk(r.t, livesSize, fs)
	ways := []func() time.Duration{func() time.Duration { return guestMount(r, disk, fs) }}
	for i, c := range clients {
		ways = append(ways, of(r, c, fmt.Sprintf("life-%d-%d", len(r.sheet.all), i), fs))
	}
	took := inTurns(rounds, ways...)
	guest, host := took[0], took[1]
	r.sheet.ratios(fmt.Sprintf("stage, publish, unpublish and unstage of an %s, %s, p50", fs, state), millis(host)+" on the host",
		ratio{"deferred by raw block access", took[2], host, 0.35}, ratio{"by the driver", took[3], host, 0.25},
		ratio{"not deferred", took[4], host, 1.08}, ratio{"beside it for the guest's mount and unmount", guest, host, math.Inf(1)})
}

// formatted makes a volume, whose first life formats it, and gives a life of it.
func formatted(r *testbed, c *csivolume.Client, name, fs string) func() time.Duration {
	v := created(r, c, name, fs)
	life(r, v)
	return func() time.Duration { return life(r, v) }
}

// blank gives the first life of a new volume, which is deleted after it.
func blank(r *testbed, c *csivolume.Client, name, fs string) func() time.Duration {
	n := 0
	return func() time.Duration {
		n++
		v := created(r, c, fmt.Sprintf("%s-%d", name, n), fs)
		took := life(r, v)
		r.must(v.Remove())
		return took
	}
}

func created(r *testbed, c *csivolume.Client, name, fs string) *csivolume.Volume {
	return c.Create(r.t, name, fs, livesSize)
}

// life is how long all four calls take.
func life(r *testbed, v *csivolume.Volume) time.Duration {
	began := time.Now()
	v.Publish()
	r.must(v.TearDown())
	r.must(v.Unstage())
	return time.Since(began)
}

// guestMount is how long a kernel takes to mount a formatted device and to unmount it.
func guestMount(r *testbed, disk, fs string) time.Duration {
	dir := filepath.Join(r.daemon.Dir, "guest")
	r.must(os.MkdirAll(dir, 0o700))
	began := time.Now()
	r.must(unix.Mount(disk, dir, fs, 0, ""))
	r.must(unix.Unmount(dir, 0))
	return time.Since(began)
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
	return crustDriver{csivolume.NewClient(conn, name, r.daemon.Kubelet), r.front(name)}
}

// front calls a driver through the daemon.
func (r *testbed) front(name string) *csivolume.Client {
	return csivolume.NewClient(r.daemon.Dial(r.frontSocket(name)), name, r.daemon.Kubelet)
}

func (r *testbed) frontSocket(name string) string { return r.daemon.Dir + "/run/csi/" + name + ".sock" }
