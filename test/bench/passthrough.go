package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// streams compares a stream of a CSI driver over its own socket with the same through the daemon.
func streams(r *testbed) {
	r.daemon.Extra = "front: {enabled: true}"
	r.daemon.Start()
	passed := startDriver(r, "")
	direct := r.daemon.Dial(driverSocket(r))
	for _, extents := range []int32{256, 4096} {
		got := inTurns(max(5, r.set.scale(15)), throughput(r, direct, extents), throughput(r, passed, extents))
		share := got[1] / got[0]
		r.sheet.atLeast(fmt.Sprintf("a stream of changed-block messages with %d extents, share of the driver's own throughput", extents), ">= 0.8x", share, 0.8,
			fmt.Sprintf("%.2fx (%.0f of %.0f messages/s)", share, got[1], got[0]))
	}
}

func driverSocket(r *testbed) string { return r.daemon.Dir + "/csi.sock" }

// startDriver starts the driver and connects to it through the daemon. With a directory of images it can defer.
func startDriver(r *testbed, images string) *grpc.ClientConn {
	registry := r.daemon.Kubelet + "/crust-proxy/registry"
	r.must(os.MkdirAll(registry, 0o700))
	through := r.frontSocket(driverName)
	r.spawn(through, roleDriver, driverSocket(r), registry, images, r.daemon.Kata, r.daemon.GoSandboxes)
	return r.daemon.Dial(through)
}

// throughput is that of a driver that sends without a pause, in messages a second, over about a million extents.
func throughput(r *testbed, conn *grpc.ClientConn, extents int32) func() float64 {
	count := (1 << 20) / int(extents)
	client := csi.NewSnapshotMetadataClient(conn)
	return func() float64 {
		start := time.Now()
		stream, err := client.GetMetadataAllocated(r.ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: strconv.Itoa(count), MaxResults: extents})
		r.must(err)
		got := 0
		for ; err == nil; got++ {
			_, err = stream.Recv()
		}
		if got--; got != count || !errors.Is(err, io.EOF) {
			r.t.Fatalf("after %d of %d messages: %v", got, count, err)
		}
		return float64(count) / time.Since(start).Seconds()
	}
}
