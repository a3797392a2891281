package rig

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// callTime bounds each call, so that who hangs does not keep a test from cleaning up. It is kubelet's for CSI.
const callTime = 2 * time.Minute

// Dial connects to a socket for the time of the test. A server that was started again is found at once.
func Dial(t T, socket string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn := check.Value(Connect(socket, options...))(t)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Connect is Dial for a connection that the caller closes.
func Connect(socket string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	quick := backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond}
	return grpc.NewClient("unix:"+socket, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithUnaryInterceptor(inTime),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: 20 * time.Second}),
	}, options...)...)
}

func inTime(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	return call(ctx, method, req, reply, conn, opts...)
}

// OfAnotherBoot gives crust-driver's records the id of another boot.
func OfAnotherBoot(t T, data string) {
	t.Helper()
	records, _ := filepath.Glob(data + "/volumes/*.json")
	for _, path := range records {
		raw := check.Value(os.ReadFile(path))(t)
		raw = regexp.MustCompile(`"boot":"[^"]*"`).ReplaceAll(raw, []byte(`"boot":"before"`))
		check.Must(t, os.WriteFile(path, raw, 0o600))
	}
}

// NewDriver prepares crust-driver, which serves on a socket, and a connection to it. The log lies beside the socket.
func NewDriver(t T, program, socket, data string, args ...string) (*Process, *grpc.ClientConn) {
	t.Helper()
	conn := Dial(t, socket)
	p := &Process{
		Name: "crust-driver", Program: program, LogFile: filepath.Dir(socket) + "/crust-driver.log",
		Args: append([]string{"--endpoint", "unix://" + socket, "--data-dir", data}, args...),
		Ready: func() error { // the socket of an earlier life is there before the new one: only an answer counts
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{})
			return err
		},
	}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("log of crust-driver:\n%s", Tail(p.Log()))
		}
	})
	return p, conn
}

// Before serves CSI before a driver: what local has is answered by it, and may be forwarded;
// every other call goes on as it is.
func Before(t T, conn grpc.ClientConnInterface, socket string, local map[string]passthrough.Local) {
	t.Helper()
	proxy := passthrough.New(conn, local)
	t.Cleanup(check.Value(Serve(socket, func(*grpc.Server) {}, proxy.ServerOptions()...))(t).Kill)
}

// Hide answers NodeGetCapabilities without some that the driver has, and counts them.
func Hide(kinds ...csi.NodeServiceCapability_RPC_Type) (local passthrough.Local, hidden *atomic.Int64) {
	hidden = new(atomic.Int64)
	return func(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
		raw, err := forward(ctx, request)
		if err != nil {
			return nil, err
		}
		reply := &csi.NodeGetCapabilitiesResponse{}
		if err := proto.Unmarshal(raw, reply); err != nil {
			return nil, err
		}
		before := len(reply.GetCapabilities())
		reply.Capabilities = slices.DeleteFunc(reply.Capabilities, func(one *csi.NodeServiceCapability) bool {
			return slices.Contains(kinds, one.GetRpc().GetType())
		})
		hidden.Add(int64(before - len(reply.GetCapabilities())))
		return proto.Marshal(reply)
	}, hidden
}

// MountAccess is to a filesystem, for writers on one node.
func MountAccess(fs string, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs, MountFlags: flags}},
	}
}

// BlockAccess is to a device, for writers on one node.
func BlockAccess() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}
