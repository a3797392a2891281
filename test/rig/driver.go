package rig

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/passthrough"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Dial connects to a socket for the time of the test.
func Dial(t T, socket string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	check.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// NewDriver prepares crust-driver, which serves on a socket, and a connection to it. The
// log lies beside the socket.
func NewDriver(t T, program, socket, data string, args ...string) (*Process, *grpc.ClientConn) {
	t.Helper()
	conn := Dial(t, socket)
	p := &Process{
		Name: "crust-driver", Program: program, LogFile: filepath.Dir(socket) + "/crust-driver.log",
		Args: append([]string{"--endpoint", "unix://" + socket, "--data-dir", data}, args...),
		Ready: func() error { // the socket of an earlier life is there before the new one: only an answer counts
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			conn.ResetConnectBackoff()
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
	listener, err := net.Listen("unix", socket)
	check.Must(t, err)
	proxy := passthrough.New(func() (grpc.ClientConnInterface, error) { return conn, nil }, local)
	server := grpc.NewServer(proxy.ServerOptions()...)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-done })
}

// Hide answers NodeGetCapabilities without some that the driver has, and counts them.
func Hide(kinds ...csi.NodeServiceCapability_RPC_Type) (local passthrough.Local, hidden *atomic.Int64) {
	hidden = new(atomic.Int64)
	return func(ctx context.Context, _ string, request []byte, forward passthrough.Forward) ([]byte, error) {
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

// DriverName is that of crust-driver, unless it is given another one.
const DriverName = "driver.crust-proxy.dev"

// Fronted is crust-driver behind the front of a daemon.
type Fronted struct {
	Process *Process
	// Data has its images, Registry its registration socket.
	Data, Registry string
	// Socket is where it serves, and Front where the daemon does in its place.
	Socket, Front string
}

// NewFronted lays out kubelet's directories and the driver's, and has the daemon run its
// front by a policy, which is YAML.
func NewFronted(d *Daemon, policy string, args ...string) *Fronted {
	d.T.Helper()
	d.Extra = "front: {enabled: true}\n" + policy
	f := &Fronted{
		Data: d.Dir + "/data", Registry: d.Kubelet + "/crust-proxy/registry",
		Socket: d.Kubelet + "/plugins/" + DriverName + "/csi.sock", Front: d.Dir + "/run/csi/" + DriverName + ".sock",
	}
	for _, dir := range []string{f.Data, f.Registry, d.Kubelet + "/plugins_registry", filepath.Dir(f.Socket)} {
		d.must(os.MkdirAll(dir, 0o755)) //nolint:gosec // as on a node
	}
	f.Process, _ = NewDriver(d.T, d.Program("crust-driver"), f.Socket, f.Data, append([]string{
		"--node-id", "node-1", "--capacity", "100000000000",
		"--kubelet-registration-socket", f.Registration(), "--kubelet-endpoint", f.Socket,
	}, args...)...)
	return f
}

// Registration is the socket by which it registers with the daemon.
func (f *Fronted) Registration() string { return f.Registry + "/" + DriverName + "-reg.sock" }

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
