package peercred

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("PEERCRED_TEST_DIAL"); path != "" {
		os.Exit(childDials(path))
	}
	goleak.VerifyTestMain(m)
}

// countingCodec counts the requests that were decoded.
type countingCodec struct {
	encoding.CodecV2
	decoded *atomic.Int32
}

func (c countingCodec) Unmarshal(data mem.BufferSlice, v any) error {
	c.decoded.Add(1)
	return c.CodecV2.Unmarshal(data, v)
}

// served is a server under an Authorizer, and what happened at it.
type served struct {
	path             string
	allowed          *Authorizer
	decoded, handled atomic.Int32
	refusals         chan Peer
	peers            chan Peer
}

func serve(t *testing.T, policy Policy, dir string) *served {
	t.Helper()
	return serveIdle(t, policy, dir, idleTime)
}

func serveIdle(t *testing.T, policy Policy, dir string, idle time.Duration) *served {
	t.Helper()
	s := &served{path: filepath.Join(dir, "test.sock"), refusals: make(chan Peer, 64), peers: make(chan Peer, 64)}
	s.allowed = NewAuthorizer("authorization.test", policy, func(who Peer) { s.refusals <- who })
	s.allowed.idle = idle
	listener := check.Value(Listen(s.path, 0o660, ""))(t)
	options := append(s.allowed.ServerOptions(),
		grpc.ForceServerCodecV2(countingCodec{encoding.GetCodecV2(proto.Name), &s.decoded}),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			s.handled.Add(1)
			if who, ok := FromContext(ctx); ok {
				s.peers <- who
			}
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			s.handled.Add(1)
			return next(srv, stream)
		}))
	server := grpc.NewServer(options...)
	healthv1.RegisterHealthServer(server, health.NewServer())
	rpctest.ServeOn(t, listener, server)
	return s
}

func dial(t *testing.T, path string) healthv1.HealthClient {
	t.Helper()
	return healthv1.NewHealthClient(rpctest.Dial(t, path))
}

func self() uint32 { return uint32(os.Getuid()) } //nolint:gosec // a uid

func TestAllowedPeerIsKnownToTheHandler(t *testing.T) {
	s := serve(t, Policy{UIDs: []uint32{self()}}, t.TempDir())
	check.Value(dial(t, s.path).Check(t.Context(), &healthv1.HealthCheckRequest{}))(t)
	got := <-s.peers
	groups := check.Value(os.Getgroups())(t)
	want := Peer{PID: int32(os.Getpid()), UID: self(), GID: uint32(os.Getgid())} //nolint:gosec // ids
	for _, gid := range groups {
		want.Groups = append(want.Groups, uint32(gid)) //nolint:gosec // an id
	}
	slices.Sort(want.Groups)
	slices.Sort(got.Groups)
	check.Same(t, cmp.Diff(want, got, cmpopts.EquateEmpty()), "the peer")
}

func TestOtherPeerIsRefusedBeforeAnythingIsDecoded(t *testing.T) {
	s := serve(t, Policy{UIDs: []uint32{self() + 1}, GIDs: []uint32{4294967294}}, t.TempDir())
	client := dial(t, s.path)
	check.Code(t, check.Err(client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "x"})), codes.PermissionDenied,
		"uid "+strconv.Itoa(os.Getuid()), "gid "+strconv.Itoa(os.Getgid()), "authorization.test.uids")
	watch, err := client.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "x"})
	if err == nil {
		_, err = watch.Recv()
	}
	check.Code(t, err, codes.PermissionDenied)
	check.That(t, s.decoded.Load() == 0 && s.handled.Load() == 0, "%d requests were decoded, %d handled", s.decoded.Load(), s.handled.Load())
	check.Equal(t, (<-s.refusals).UID, self(), "the hook was told the uid")
}

func TestPolicyChangesForOpenConnections(t *testing.T) {
	s := serve(t, Policy{}, t.TempDir())
	client := dial(t, s.path)
	wantCode := func(want codes.Code) {
		t.Helper()
		check.Code(t, check.Err(client.Check(t.Context(), &healthv1.HealthCheckRequest{})), want)
	}
	wantCode(codes.PermissionDenied)
	s.allowed.SetPolicy(Policy{GIDs: []uint32{uint32(os.Getgid())}}) //nolint:gosec // an id
	wantCode(codes.OK)
	s.allowed.SetPolicy(Policy{UIDs: []uint32{self() + 1}})
	wantCode(codes.PermissionDenied)
}

// TestStrangersAreFew: a peer that may not call cannot use up the server's descriptors, and keeps out nobody who may.
func TestStrangersAreFew(t *testing.T) {
	s := serve(t, Policy{UIDs: []uint32{self()}}, t.TempDir())
	open := func() net.Conn {
		conn := check.Value(net.Dial("unix", s.path))(t)
		t.Cleanup(func() { _ = conn.Close() })
		check.Value(conn.Read(make([]byte, 9)))(t) // the server has begun
		return conn
	}
	ends := func(conn net.Conn, within time.Duration) bool {
		_ = conn.SetReadDeadline(time.Now().Add(within))
		_, err := io.Copy(io.Discard, conn)
		return !errors.Is(err, os.ErrDeadlineExceeded)
	}
	friend := open()
	s.allowed.SetPolicy(Policy{})
	var strangers []net.Conn
	for range maxStrangers + 1 {
		strangers = append(strangers, open())
	}
	check.That(t, ends(strangers[0], 20*time.Second), "the oldest stranger stays")
	for i, conn := range append(strangers[1:], friend) {
		check.That(t, !ends(conn, time.Millisecond), "connection %d has ended", i)
	}
}

// TestIdleConnectionsEnd, and the client's next call makes another one. A watch goes on.
func TestIdleConnectionsEnd(t *testing.T) {
	s := serveIdle(t, Policy{UIDs: []uint32{self()}}, t.TempDir(), time.Second)
	ctx := check.Within(t, 20*time.Second)
	watching, calling := rpctest.Dial(t, s.path), rpctest.Dial(t, s.path)
	watch := check.Value(healthv1.NewHealthClient(watching).Watch(ctx, &healthv1.HealthCheckRequest{}))(t)
	check.Value(watch.Recv())(t)
	for range 2 {
		check.Value(healthv1.NewHealthClient(calling).Check(ctx, &healthv1.HealthCheckRequest{}))(t)
		check.Require(t, calling.WaitForStateChange(ctx, connectivity.Ready), "the connection stays")
	}
	check.Equal(t, watching.GetState(), connectivity.Ready, "the watch's connection")
}

// TestAnotherUser calls as a user of another uid, and of a group by membership.
func TestAnotherUser(t *testing.T) {
	check.NeedsRoot(t)
	dir := check.ShortDir(t)            // t.TempDir is closed to others
	check.Must(t, os.Chmod(dir, 0o755)) //nolint:gosec // the other user must reach the socket
	s := serve(t, Policy{UIDs: []uint32{0}}, dir)
	program := filepath.Join(dir, "dialer")
	check.Must(t, os.WriteFile(program, check.Value(os.ReadFile(os.Args[0]))(t), 0o755)) //nolint:gosec // the other user runs it
	check.Must(t, os.Chmod(s.path, 0o666))                                               //nolint:gosec // past the file's mode: the second line must hold alone
	groups := make([]uint32, 100)                                                        // more than the first buffer of peerGroups holds
	for i := range groups {
		groups[i] = 60000 + uint32(i) //nolint:gosec // a small number
	}
	call := func() string {
		cmd := exec.CommandContext(check.Within(t, 10*time.Second), program) //nolint:gosec // this very program
		cmd.Env = append(os.Environ(), "PEERCRED_TEST_DIAL="+s.path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54322, Groups: groups}}
		return check.Run(t, cmd)
	}
	got := call()
	check.That(t, got == "PermissionDenied" && s.handled.Load() == 0, "another uid got %q", got)
	s.allowed.SetPolicy(Policy{UIDs: []uint32{0}, GIDs: []uint32{60099}})
	check.Equal(t, call(), "OK", "a member of an allowed group")
}

func childDials(path string) int {
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	_, _ = os.Stdout.WriteString(status.Code(err).String())
	if conn.Close() != nil {
		return 1
	}
	return 0
}

func TestOnlyUnixSockets(t *testing.T) {
	a, b := net.Pipe()
	defer func() { _ = errors.Join(a.Close(), b.Close()) }()
	_, _, err := (transport{}).ServerHandshake(a)
	check.That(t, err != nil, "a connection of another kind was taken")
	_, ok := FromContext(t.Context())
	check.That(t, !ok, "a context outside of a call has a peer")
}
