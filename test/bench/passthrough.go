package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// passthrough compares calls to a CSI driver over its own socket with the same
// calls through the daemon. They take turns.
func passthrough(ctx context.Context, set settings, r *testbed, s *sheet) error {
	ways, done, err := r.ways()
	if err != nil {
		return err
	}
	defer done()
	if err := unaryLatency(ctx, set, ways, s); err != nil {
		return err
	}
	if err := unaryRate(ctx, set, ways, s); err != nil {
		return err
	}
	for _, extents := range []int32{256, 4096} {
		if err := streaming(ctx, set, ways, s, extents); err != nil {
			return err
		}
	}
	return nil
}

// ways are the connections straight to the driver and through the daemon.
type ways struct{ direct, passed *grpc.ClientConn }

// ways starts the daemon and the driver, and waits for the daemon's socket.
func (r *testbed) ways() (*ways, func(), error) {
	r.front = true
	if _, err := r.start(); err != nil {
		return nil, nil, err
	}
	registry := r.kubelet + "/crust-proxy/registry"
	if err := os.MkdirAll(registry, 0o700); err != nil {
		return nil, nil, err
	}
	through := r.dir + "/run/csi/" + driverName + ".sock"
	if err := r.spawn(through, roleDriver, r.dir+"/csi.sock", registry+"/"+driverName+"-reg.sock"); err != nil {
		return nil, nil, err
	}
	direct, err := r.dial(r.dir + "/csi.sock")
	if err != nil {
		return nil, nil, err
	}
	passed, err := r.dial(through)
	if err != nil {
		return nil, nil, errors.Join(err, direct.Close())
	}
	return &ways{direct, passed}, func() { _, _ = direct.Close(), passed.Close() }, nil
}

func unaryLatency(ctx context.Context, set settings, w *ways, s *sheet) error {
	var all [2]durations
	for range set.scale(40) {
		for i, conn := range []*grpc.ClientConn{w.direct, w.passed} {
			took, err := timed(200, nodeInfo(ctx, conn))
			if err != nil {
				return err
			}
			all[i] = append(all[i], took...)
		}
	}
	s.tell("a call to a CSI driver over its own socket, p50", micros(all[0].median()))
	s.ratio("the same through crust-proxy, p50", "<= 2.2x", all[1].median(), all[0].median(), 2.2)
	s.tell("the same, p99", fmt.Sprintf("%.2fx (%s to %s)", float64(all[1].at(0.99))/float64(all[0].at(0.99)),
		micros(all[1].at(0.99)), micros(all[0].at(0.99))))
	return nil
}

func nodeInfo(ctx context.Context, conn *grpc.ClientConn) func() error {
	client := csi.NewNodeClient(conn)
	return func() error { _, err := client.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); return err }
}

func unaryRate(ctx context.Context, set settings, w *ways, s *sheet) error {
	var all [2][]float64
	for range max(3, set.scale(5)) {
		for i, conn := range []*grpc.ClientConn{w.direct, w.passed} {
			call := nodeInfo(ctx, conn)
			got, err := rate(manyCallers, time.Second, func(int) error { return call() })
			if err != nil {
				return err
			}
			all[i] = append(all[i], got)
		}
	}
	direct, passed := median(all[0]), median(all[1])
	s.tell(fmt.Sprintf("calls a second by %d callers through crust-proxy, share of the driver's own", manyCallers),
		fmt.Sprintf("%.0f %% (%.0f/s)", 100*passed/direct, passed))
	return nil
}

// streaming compares the throughput of a driver that sends without a pause.
func streaming(ctx context.Context, set settings, w *ways, s *sheet, extents int32) error {
	var all [2][]float64
	for range max(5, set.scale(15)) {
		for i, conn := range []*grpc.ClientConn{w.direct, w.passed} {
			got, err := throughput(ctx, conn, extents)
			if err != nil {
				return err
			}
			all[i] = append(all[i], got)
		}
	}
	direct, passed := median(all[0]), median(all[1])
	share := passed / direct
	s.atLeast(fmt.Sprintf("a stream of changed-block messages with %d extents, share of the driver's own throughput", extents), ">= 0.8x", share, 0.8,
		fmt.Sprintf("%.2fx (%.0f of %.0f messages/s)", share, passed, direct))
	return nil
}

// throughput is in messages a second, over about a million extents.
func throughput(ctx context.Context, conn *grpc.ClientConn, extents int32) (float64, error) {
	count := (1 << 20) / int(extents)
	start := time.Now()
	stream, err := csi.NewSnapshotMetadataClient(conn).GetMetadataAllocated(ctx,
		&csi.GetMetadataAllocatedRequest{SnapshotId: strconv.Itoa(count), MaxResults: extents})
	if err != nil {
		return 0, err
	}
	for got := 0; ; got++ {
		switch _, err := stream.Recv(); {
		case errors.Is(err, io.EOF) && got == count:
			return float64(count) / time.Since(start).Seconds(), nil
		case err != nil:
			return 0, fmt.Errorf("after %d of %d messages: %w", got, count, err)
		}
	}
}
