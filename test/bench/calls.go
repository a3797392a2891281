package main

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// fullNode is how many pods kubelet runs by default, here with a volume each.
const fullNode = 110

const deferAll = "front: {enabled: true}\npolicy: {rules: [{name: all, defer: true}]}"

// podStart measures what crust-proxy adds to the calls for which a pod waits: the driver
// answers at once, so that the rest is the front's, the broker's and the kernel's work.
func podStart(r *testbed) {
	r.daemon.Extra = deferAll
	r.daemon.Start()
	startDriver(r, "/dev")
	disk := r.disk(0)
	start := func(c *csivolume.Client, ask bool) func() time.Duration {
		v := c.Volume(r.t, "started", "ext4")
		v.ID, v.Ask = filepath.Base(disk), ask
		return func() time.Duration {
			began := time.Now()
			v.Publish()
			took := time.Since(began)
			r.must(v.TearDown())
			r.must(v.Unstage())
			return took
		}
	}
	direct := csivolume.NewClient(r.daemon.Dial(driverSocket(r)), driverName, r.daemon.Kubelet)
	took := turns(max(100, r.set.scale(3000)), start(direct, true), start(r.front(driverName), false))
	plain, passed := durations(took[0]), durations(took[1])
	r.sheet.tell("what crust-proxy adds to the start of a pod with a deferred volume (stage and publish), p50, p99",
		millis(median(passed)-median(plain))+", "+millis(passed.p99()-plain.p99()))
}

// statsCalls compares stats through crust-proxy with those of a driver that asks the shim
// by itself, as kubelet gets them, and kubelet's questions for health.
func statsCalls(r *testbed) {
	r.daemon.Extra = deferAll
	r.daemon.Start()
	startDriver(r, r.daemon.Images)
	r.shims(fullNode, r.daemon.Images)
	ours := r.front(driverName)
	volumes := make([]*csivolume.Volume, fullNode)
	for n := range volumes {
		r.image(n)
		v := ours.Volume(r.t, strconv.Itoa(n), "ext4")
		v.ID = v.Name
		v.Publish()
		r.must(kata.WriteID(r.daemon.Kata, v.Target, sandboxID(n)))
		volumes[n] = v
	}
	stats := func(node csi.NodeClient, v *csivolume.Volume) error {
		_, err := node.NodeGetVolumeStats(r.ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: v.Target})
		return err
	}
	capabilities := func(node csi.NodeClient, _ *csivolume.Volume) error {
		_, err := node.NodeGetCapabilities(r.ctx, &csi.NodeGetCapabilitiesRequest{})
		return err
	}
	health := func(node csi.NodeClient, v *csivolume.Volume) error {
		_, err := node.NodeGetVolumeHealth(r.ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: v.ID, VolumePublishPath: v.Target})
		return err
	}
	driver := csi.NewNodeClient(r.daemon.Dial(driverSocket(r)))
	took := r.timed(r.set.scale(20), 200,
		func() error { return stats(ours.Node, volumes[0]) }, func() error { return stats(driver, volumes[0]) })
	r.sheet.ratio("stats, back to back, against a driver that dials Kata's shim by itself, p50", "<= 0.9x", median(took[0]), median(took[1]), 0.9)
	// One volume after another, each question on a new connection: after 60 s to 120 s nothing is warm.
	polled := func(socket string, calls ...func(csi.NodeClient, *csivolume.Volume) error) func() error {
		n := 0
		return func() error {
			n++
			for _, call := range calls {
				if err := onNewConnection(socket, func(node csi.NodeClient) error { return call(node, volumes[n%fullNode]) }); err != nil {
					return err
				}
			}
			return nil
		}
	}
	front := r.frontSocket(driverName)
	took = r.timed(r.set.scale(20), fullNode, polled(front, stats), polled(driverSocket(r), stats))
	r.sheet.ratio("stats at kubelet's pace, on new connections, against that driver, p50", "<= 0.9x", median(took[0]), median(took[1]), 0.9)
	before, rounds := rig.CPUTime(r.t, r.daemon.Pid()), r.set.scale(20)
	took = r.timed(rounds, fullNode, polled(front, capabilities, health), polled(driverSocket(r), capabilities, health))
	used := (rig.CPUTime(r.t, r.daemon.Pid()) - before) / time.Duration(rounds)
	r.sheet.ratios(fmt.Sprintf("kubelet 1.37's health loop, %d calls a minute on new connections: CPU time; the calls, p50", 2*fullNode),
		millis(used), ratio{"of that driver's", median(took[0]), median(took[1]), math.Inf(1)})
}

// onNewConnection makes a call as kubelet does.
func onNewConnection(socket string, call func(csi.NodeClient) error) error {
	conn, err := rig.Connect(socket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return call(csi.NewNodeClient(conn))
}

// guard keeps an eye on stage and unstage: nobody waits for an empty call.
func guard(r *testbed) {
	r.daemon.Start()
	v, ours, empty := r.volume(0, r.disk(0)), r.daemon.Runtime(), r.empty()
	took := r.timed(r.set.scale(20), 200, func() error { return stageAndUnstage(r.ctx, ours, v) }, func() error {
		_, err := empty.RuntimeStageVolume(r.ctx, v.request)
		return err
	})
	r.sheet.ratio("stage and unstage together, p50, against one empty call: a guard, which nobody feels", "<= 6.5x", median(took[0]), median(took[1]), 6.5)
}

func stats(ctx context.Context, client runtimev1.RuntimeClient, v *volume) error {
	_, err := client.RuntimeGetVolumeStats(ctx, v.stats)
	return err
}

func stageAndUnstage(ctx context.Context, client runtimev1.RuntimeClient, v *volume) error {
	if _, err := client.RuntimeStageVolume(ctx, v.request); err != nil {
		return err
	}
	_, err := client.RuntimeUnstageVolume(ctx, v.unstage)
	return err
}
