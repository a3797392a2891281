package peercred

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
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
	s := &served{path: filepath.Join(dir, "test.sock"), refusals: make(chan Peer, 64), peers: make(chan Peer, 64)}
	s.allowed = NewAuthorizer("authorization.test", policy, func(who Peer) { s.refusals <- who })
	listener, err := Listen(s.path, 0o660, "")
	if err != nil {
		t.Fatal(err)
	}
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
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return s
}

func dial(t *testing.T, path string) healthv1.HealthClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return healthv1.NewHealthClient(conn)
}

func self() uint32 { return uint32(os.Getuid()) } //nolint:gosec // a uid

func TestAllowedPeerIsKnownToTheHandler(t *testing.T) {
	s := serve(t, Policy{UIDs: []uint32{self()}}, t.TempDir())
	if _, err := dial(t, s.path).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	got := <-s.peers
	groups, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	want := Peer{PID: int32(os.Getpid()), UID: self(), GID: uint32(os.Getgid())} //nolint:gosec // ids
	for _, gid := range groups {
		want.Groups = append(want.Groups, uint32(gid)) //nolint:gosec // an id
	}
	slices.Sort(want.Groups)
	slices.Sort(got.Groups)
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Error(diff)
	}
}

func TestOtherPeerIsRefusedBeforeAnythingIsDecoded(t *testing.T) {
	s := serve(t, Policy{UIDs: []uint32{self() + 1}, GIDs: []uint32{4294967294}}, t.TempDir())
	client := dial(t, s.path)
	_, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "x"})
	if status.Code(err) != codes.PermissionDenied {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"uid " + strconv.Itoa(os.Getuid()), "gid " + strconv.Itoa(os.Getgid()), "authorization.test.uids"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
	watch, err := client.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "x"})
	if err == nil {
		_, err = watch.Recv()
	}
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("a stream: %v", err)
	}
	if s.decoded.Load() != 0 || s.handled.Load() != 0 {
		t.Errorf("%d requests were decoded, %d handled", s.decoded.Load(), s.handled.Load())
	}
	if got := <-s.refusals; got.UID != self() {
		t.Errorf("the hook was told %+v", got)
	}
}

func TestPolicyChangesForOpenConnections(t *testing.T) {
	s := serve(t, Policy{}, t.TempDir())
	client := dial(t, s.path)
	check := func() codes.Code {
		_, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{})
		return status.Code(err)
	}
	if got := check(); got != codes.PermissionDenied {
		t.Errorf("an empty policy: %v", got)
	}
	s.allowed.SetPolicy(Policy{GIDs: []uint32{uint32(os.Getgid())}}) //nolint:gosec // an id
	if got := check(); got != codes.OK {
		t.Errorf("allowed by group: %v", got)
	}
	s.allowed.SetPolicy(Policy{UIDs: []uint32{self() + 1}})
	if got := check(); got != codes.PermissionDenied {
		t.Errorf("no longer allowed: %v", got)
	}
}

// TestAnotherUser calls as a user of another uid, and of a group by membership.
func TestAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can call as another user")
	}
	dir, err := os.MkdirTemp("", "peercred") // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // the other user must reach the socket
		t.Fatal(err)
	}
	s := serve(t, Policy{UIDs: []uint32{0}}, dir)
	program := filepath.Join(dir, "dialer")
	copyFile(t, program)
	if err := os.Chmod(s.path, 0o666); err != nil { //nolint:gosec // past the file's mode: the second line must hold alone
		t.Fatal(err)
	}
	groups := make([]uint32, 100) // more than the first buffer of peerGroups holds
	for i := range groups {
		groups[i] = 60000 + uint32(i) //nolint:gosec // a small number
	}
	call := func() string {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, program) //nolint:gosec // this very program
		cmd.Env = append(os.Environ(), "PEERCRED_TEST_DIAL="+s.path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 54321, Gid: 54322, Groups: groups}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := call(); got != "PermissionDenied" || s.handled.Load() != 0 {
		t.Errorf("another uid got %q", got)
	}
	s.allowed.SetPolicy(Policy{UIDs: []uint32{0}, GIDs: []uint32{60099}})
	if got := call(); got != "OK" {
		t.Errorf("a member of an allowed group got %q", got)
	}
}

func copyFile(t *testing.T, to string) {
	t.Helper()
	content, err := os.ReadFile(os.Args[0])
	if err == nil {
		err = os.WriteFile(to, content, 0o755) //nolint:gosec // the other user runs it
	}
	if err != nil {
		t.Fatal(err)
	}
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
	if _, _, err := Credentials().ServerHandshake(a); err == nil {
		t.Error("a connection of another kind was taken")
	}
	if _, ok := FromContext(t.Context()); ok {
		t.Error("a context outside of a call has a peer")
	}
}
