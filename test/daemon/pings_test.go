//go:build system

package daemon

import (
	"bytes"
	"context"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// recorded is a connection whose reader keeps what it read.
type recorded struct {
	net.Conn
	seen bytes.Buffer
}

func (r *recorded) Read(p []byte) (int, error) {
	n, err := r.Conn.Read(p)
	r.seen.Write(p[:n])
	return n, err
}

// frames counts the HTTP/2 frames of a server by their type. Acknowledgements are left
// out: they answer the client.
func (r *recorded) frames() map[byte]int {
	const header, ack = 9, 1
	count := make(map[byte]int)
	for rest := r.seen.Bytes(); len(rest) >= header; {
		if kind := rest[3]; kind < framePing || rest[4]&ack == 0 {
			count[kind]++
		}
		rest = rest[min(len(rest), header+int(rest[0])<<16+int(rest[1])<<8+int(rest[2])):]
	}
	return count
}

const frameHeaders, framePing = 1, 6

// TestCallsCostNoPings: a ping for each call would wake both sides once more.
func TestCallsCostNoPings(t *testing.T) {
	d := rig.NewDaemon(t)
	d.Start()
	for name, call := range map[string]struct {
		socket string
		make   func(conn *grpc.ClientConn) error
	}{
		"runtime": {d.RuntimeSocket, func(conn *grpc.ClientConn) error {
			_, err := runtimev1.NewRuntimeClient(conn).RuntimeGetVolumeStats(t.Context(),
				&runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: d.Target("pod-1")})
			return err
		}},
		"admin": {d.AdminSocket, func(conn *grpc.ClientConn) error {
			_, err := adminv1.NewAdminClient(conn).GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: d.Target("pod-1")})
			return err
		}},
	} {
		tape := &recorded{}
		dial := func(ctx context.Context, _ string) (_ net.Conn, err error) {
			tape.Conn, err = (&net.Dialer{}).DialContext(ctx, "unix", call.socket)
			return tape, err
		}
		conn, err := grpc.NewClient("passthrough:///"+name, grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
		check.Must(t, err)
		const calls = 3
		for range calls {
			check.Code(t, call.make(conn), codes.NotFound)
		}
		check.Must(t, conn.Close())
		if got := tape.frames(); got[frameHeaders] < calls || got[framePing] > 0 {
			t.Errorf("%s: frames by their type: %v", name, got)
		}
	}
}
