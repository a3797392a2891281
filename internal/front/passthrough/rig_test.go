package passthrough

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a driver on a socket, and the proxy to it on another one. A test makes the same call by both ways.
type rig struct {
	driver          *grpc.Server
	direct, proxied *grpc.ClientConn
}

type parts struct {
	driver, proxy []grpc.ServerOption
	dial          []grpc.DialOption
	local         map[string]Local
	register      func(*grpc.Server)
}

func newRig(t *testing.T, p parts) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{driver: grpc.NewServer(p.driver...)}
	if p.register != nil {
		p.register(r.driver)
	}
	rpctest.Serve(t, dir+"/driver.sock", r.driver)
	back := rpctest.Dial(t, dir+"/driver.sock", append(DialOptions(), p.dial...)...)
	proxy := New(back, p.local)
	rpctest.Serve(t, dir+"/proxy.sock", grpc.NewServer(append(p.proxy, proxy.ServerOptions()...)...))
	r.direct, r.proxied = rpctest.Dial(t, dir+"/driver.sock"), rpctest.Dial(t, dir+"/proxy.sock")
	return r
}

// raw makes a driver of one function, whatever the method.
func raw(handle grpc.StreamHandler) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{}), grpc.UnknownServiceHandler(handle),
		grpc.MaxRecvMsgSize(64 << 20), grpc.MaxSendMsgSize(64 << 20),
	}
}

// echo answers each message by itself.
func echo(_ any, stream grpc.ServerStream) error {
	for {
		var got []byte
		if err := stream.RecvMsg(&got); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := stream.SendMsg(&got); err != nil {
			return err
		}
	}
}

// receiver and sender are the halves of a stream, of either side.
type (
	receiver interface{ RecvMsg(message any) error }
	sender   interface{ SendMsg(message any) error }
)

var bytesAsTheyAre = []grpc.CallOption{
	grpc.ForceCodecV2(codec{}), grpc.MaxCallRecvMsgSize(64 << 20), grpc.MaxCallSendMsgSize(64 << 20),
}

func ask(ctx context.Context, conn *grpc.ClientConn, method string, request []byte, options ...grpc.CallOption) ([]byte, error) {
	var reply []byte
	err := conn.Invoke(ctx, method, &request, &reply, append(options, bytesAsTheyAre...)...)
	return reply, err
}

func message(text string) *[]byte { raw := []byte(text); return &raw }

func open(ctx context.Context, t *testing.T, conn *grpc.ClientConn, method string) grpc.ClientStream {
	t.Helper()
	return check.Value(conn.NewStream(ctx, &anyStream, method, bytesAsTheyAre...))(t)
}

func send(t *testing.T, stream sender, data string) {
	t.Helper()
	check.Must(t, stream.SendMsg(message(data)))
}

// all reads to the end of a stream.
func all(stream receiver) (messages []string, err error) {
	for {
		var got []byte
		if err := stream.RecvMsg(&got); errors.Is(err, io.EOF) {
			return messages, nil
		} else if err != nil {
			return messages, err
		}
		messages = append(messages, string(got))
	}
}

func patience(t *testing.T) context.Context { return check.Within(t, time.Minute) }

// waitFor fails the test when a thing does not happen.
func waitFor(t *testing.T, what string, happened <-chan struct{}) {
	t.Helper()
	select {
	case <-happened:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s: not after 10 s", what)
	}
}

func mdOf(ctx context.Context) metadata.MD {
	md, _ := metadata.FromIncomingContext(ctx)
	return md
}
