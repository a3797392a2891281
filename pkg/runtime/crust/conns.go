package crust

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"
)

const (
	// maxConns bounds the connections that are kept. There is usually one agent per node.
	maxConns = 64
	// idleTime is how long an unused connection stays open.
	idleTime = time.Minute
	// retryTime bounds the pause before an agent that was away is dialed again.
	retryTime = 500 * time.Millisecond
)

// conns keeps connections to handlers' sockets between calls. It keeps none unless run runs,
// so that none is left behind.
type conns struct {
	sockets sockets

	mu   sync.Mutex
	keep bool
	open map[string]*keptConn // by the path of the socket
}

type keptConn struct {
	conn  *grpc.ClientConn
	users int // calls under way
}

func (c *conns) run(ctx context.Context) {
	c.setKeep(true)
	<-ctx.Done()
	c.setKeep(false)
}

func (c *conns) setKeep(keep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.keep = keep; !keep {
		c.closeUnused(true)
	}
}

// invoke makes a call. It reports whether the call was sent to somebody, also if there is no answer.
func (c *conns) invoke(ctx context.Context, path, method string, in proto.Message) (raw []byte, sent bool, err error) {
	conn, done, err := c.get(path)
	if err != nil {
		return nil, false, err
	}
	defer done()
	var out answer
	var server peer.Peer // gRPC sets it for a call that had a connection
	err = conn.Invoke(ctx, method, in, &out, grpc.Peer(&server))
	return out, server.Addr != nil, err
}

// get returns a connection, kept or for one call. The caller calls done after its call.
func (c *conns) get(path string) (conn *grpc.ClientConn, done func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := c.open[path]
	if kept == nil {
		if conn, err = c.connect(path); err != nil {
			return nil, nil, err
		}
		if !c.keep || !c.makeRoom() {
			return conn, func() { _ = conn.Close() }, nil
		}
		kept = &keptConn{conn: conn}
		c.open[path] = kept
	}
	kept.users++
	return kept.conn, func() { c.release(kept) }, nil
}

func (c *conns) release(kept *keptConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if kept.users--; !c.keep {
		c.closeUnused(true)
	}
}

// closeUnused closes connections without a call under way: all, or those that are not connected.
func (c *conns) closeUnused(all bool) {
	for path, kept := range c.open {
		if kept.users == 0 && (all || kept.conn.GetState() != connectivity.Ready) {
			_ = kept.conn.Close()
			delete(c.open, path)
		}
	}
}

// makeRoom reports whether one more connection can be kept. Where there is no room, it
// drops those that are not connected: their sandboxes may have ended.
func (c *conns) makeRoom() bool {
	if len(c.open) < maxConns {
		return true
	}
	c.closeUnused(false)
	return len(c.open) < maxConns
}

// connect makes a connection, which its first call opens.
func (c *conns) connect(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+strings.TrimPrefix(path, "/"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return c.sockets.dial(ctx, path) }),
		// The kernel says who serves the socket, and the data never leaves the node.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer), grpc.ForceCodecV2(rawAnswers{encoding.GetCodecV2("proto")})),
		// A fixed window: to estimate one, gRPC pings at nearly every answer.
		grpc.WithInitialWindowSize(maxAnswer), grpc.WithInitialConnWindowSize(maxAnswer),
		grpc.WithMaxHeaderListSize(16<<10), grpc.WithIdleTimeout(idleTime), grpc.WithDisableServiceConfig(),
		grpc.WithAuthority("crust"), grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: retryTime / 10, Multiplier: 2, MaxDelay: retryTime},
			MinConnectTimeout: 5 * time.Second,
		}))
}

// answer is the bytes of a message. It is parsed later, so that the error is ours.
type answer []byte

// rawAnswers is protobuf's codec, but does not parse answers.
type rawAnswers struct{ encoding.CodecV2 }

// Unmarshal copies the bytes of an answer.
func (rawAnswers) Unmarshal(data mem.BufferSlice, v any) error {
	out, ok := v.(*answer)
	if !ok {
		return fmt.Errorf("%T cannot hold an answer", v)
	}
	*out = data.Materialize()
	return nil
}
