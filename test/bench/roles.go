package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/kataemu"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// empty answers at once: it is the cost of a call itself.
type empty struct {
	runtimev1.UnimplementedRuntimeServer
}

func (empty) RuntimeStageVolume(context.Context, *runtimev1.RuntimeStageVolumeRequest) (*runtimev1.RuntimeStageVolumeResponse, error) {
	return &runtimev1.RuntimeStageVolumeResponse{}, nil
}

func (empty) RuntimeGetVolumeStats(context.Context, *runtimev1.RuntimeGetVolumeStatsRequest) (*runtimev1.RuntimeGetVolumeStatsResponse, error) {
	return &runtimev1.RuntimeGetVolumeStatsResponse{Usage: []*runtimev1.VolumeUsage{
		{Available: 1 << 40, Total: 1 << 41, Used: 1 << 40, Unit: runtimev1.VolumeUsage_BYTES},
		{Available: 1 << 20, Total: 1 << 21, Used: 1 << 20, Unit: runtimev1.VolumeUsage_INODES},
	}, VolumeCondition: &runtimev1.VolumeCondition{Message: "OK"}}, nil
}

func serveEmpty(socket string) error {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	runtimev1.RegisterRuntimeServer(server, empty{})
	return server.Serve(listener)
}

// serveShims serves emulated shims: DIR COUNT HUNG DEVICE-PATTERN READY, where
// the first HUNG of them never answer.
func serveShims(args []string) error {
	if len(args) != 5 {
		return fmt.Errorf("shims: DIR COUNT HUNG DEVICE-PATTERN READY")
	}
	count, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	hung, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	for n := range count {
		device := args[3]
		if count > 1 {
			device = filepath.Join(args[3], strconv.Itoa(n))
		}
		shim, err := kataemu.Start(kataemu.Options{
			Flavor: kataemu.Go, SandboxID: sandboxID(n), Sandboxes: args[0],
			Mounts: map[string]kataemu.Statfs{device: smallDisk},
		})
		if err != nil {
			return err
		}
		if n < hung {
			shim.SetFault(kataemu.Hang)
		}
	}
	if err := os.WriteFile(args[4], nil, 0o600); err != nil {
		return err
	}
	select {}
}

func sandboxID(n int) string { return fmt.Sprintf("sandbox-%06d", n) }

// smallDisk is a real statfs call, shown as a disk that fits the device.
func smallDisk() (unix.Statfs_t, error) {
	var st unix.Statfs_t
	err := unix.Statfs("/", &st)
	st.Bsize, st.Blocks, st.Bfree, st.Bavail = 4096, 1<<17, 1<<16, 1<<16
	return st, err
}

// askDirectly is how drivers ask a shim in their own process: a connection for
// each question.
func askDirectly(ctx context.Context, socket, device string) error {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	address := "http://shim/direct-volume/stats?path=" + url.QueryEscape(url.QueryEscape(device))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return err
	}
	reply, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = reply.Body.Close() }()
	body, err := readAll(reply.Body)
	if err != nil || reply.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s (%w)", reply.Status, body, err)
	}
	return nil
}

// statsOnce is a process for one question, as kata-runtime direct-volume stats.
func statsOnce(socket, device string) error { return askDirectly(context.Background(), socket, device) }

func readAll(r io.Reader) (string, error) {
	raw, err := io.ReadAll(r)
	return string(raw), err
}
