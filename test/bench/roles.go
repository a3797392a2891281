package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// empty answers at once: it is the cost of a call itself.
type empty struct {
	runtimev1.UnimplementedRuntimeServer
}

func (empty) RuntimeStageVolume(context.Context, *runtimev1.RuntimeStageVolumeRequest) (*runtimev1.RuntimeStageVolumeResponse, error) {
	return &runtimev1.RuntimeStageVolumeResponse{}, nil
}

func serveEmpty(socket string) error {
	return serve(socket, func(server *grpc.Server) { runtimev1.RegisterRuntimeServer(server, empty{}) })
}

// serve serves until the process is killed.
func serve(socket string, services func(*grpc.Server), options ...grpc.ServerOption) error {
	server, err := rig.Serve(socket, services, options...)
	if err != nil {
		return err
	}
	server.Wait()
	return nil
}

// serveShims serves emulated shims: DIR COUNT DEVICE-PATTERN READY.
func serveShims(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("shims: DIR COUNT DEVICE-PATTERN READY")
	}
	count, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	for n := range count {
		device := args[2]
		if count > 1 {
			device = filepath.Join(args[2], strconv.Itoa(n))
		}
		if _, err := kata.Start(kata.Options{
			Flavor: kata.Go, SandboxID: sandboxID(n), Sandboxes: args[0],
			Mounts: map[string]kata.Statfs{device: smallDisk},
		}); err != nil {
			return err
		}
	}
	if err := os.WriteFile(args[3], nil, 0o600); err != nil {
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
