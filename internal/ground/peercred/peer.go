// Package peercred identifies the peers of unix sockets by the credentials that the kernel
// recorded, and admits only those that the configuration names.
package peercred

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Peer is the process that connected: the credentials that the kernel recorded when the connection was made.
type Peer struct {
	PID      int32
	UID, GID uint32
	Groups   []uint32 // the supplementary ones
}

func (p Peer) inGroup(gid uint32) bool { return p.GID == gid || slices.Contains(p.Groups, gid) }

// FromContext returns the peer of a gRPC call.
func FromContext(ctx context.Context) (Peer, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Peer{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Peer, ok
}

// CallerOf names the peer as a caller of an API.
func (p Peer) CallerOf(api string) string { return fmt.Sprintf("%s API, uid %d", api, p.UID) }

// AuthInfo is what gRPC keeps about a connection.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Peer Peer
}

// AuthType names the kind of credentials.
func (AuthInfo) AuthType() string { return "peercred" }

// transport identifies the clients of unix sockets. Nothing is sent: the kernel knows the peer. Any other kind of
// connection is refused.
type transport struct {
	credentials.TransportCredentials // only clients use the rest of it
	to                               *Authorizer
}

// ServerHandshake identifies the client.
func (t transport) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	local, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("peer credentials need a unix socket, not %T", conn)
	}
	who, err := Of(local)
	if err != nil {
		return nil, nil, err
	}
	t.to.connected(conn, who)
	// The bytes never leave the kernel of this node.
	level := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return conn, AuthInfo{CommonAuthInfo: level, Peer: who}, nil
}

// maxGroups is the kernel's NGROUPS_MAX.
const maxGroups = 65536

// Of returns the peer of a connection.
func Of(conn *net.UnixConn) (Peer, error) {
	var groups []uint32
	cred, err := sys.Peer(conn)
	if err == nil {
		err = sys.OnFD(conn, func(fd int) (err error) {
			groups, err = peerGroups(fd)
			return err
		})
	}
	if err != nil {
		return Peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	return Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid, Groups: groups}, nil
}

// peerGroups returns the supplementary groups. It asks again with a larger buffer if the
// kernel says that there are more.
func peerGroups(fd int) ([]uint32, error) {
	groups := make([]uint32, 32)
	for {
		n, err := getGroups(fd, groups)
		if err == nil {
			return groups[:n:n], nil
		}
		if !errors.Is(err, unix.ERANGE) || n <= len(groups) || n > maxGroups {
			return nil, err
		}
		groups = make([]uint32, n)
	}
}

// getGroups is getsockopt(SO_PEERGROUPS), which x/sys/unix lacks. It returns the number of groups, also with ERANGE.
func getGroups(fd int, into []uint32) (int, error) {
	size := uint32(len(into) * 4) //nolint:gosec // at most maxGroups
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
		uintptr(unsafe.Pointer(&into[0])), uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // the way to make a system call
	if errno != 0 {
		return int(size / 4), errno
	}
	return int(size / 4), nil
}

// Policy is who may call: one of the users, or a member of one of the groups.
type Policy struct {
	UIDs []uint32
	GIDs []uint32
}

const (
	// idleTime is how long a connection without calls stays open: a client may forget to close it.
	idleTime = 5 * time.Minute
	// maxStrangers bounds the connections of peers that may not call, and only get to know that.
	maxStrangers = 64
)

// Authorizer enforces a policy on the calls of one server.
type Authorizer struct {
	key     string
	refused func(Peer)
	policy  atomic.Pointer[Policy]
	idle    time.Duration

	mu        sync.Mutex
	strangers []stranger // the latest ones, open or not
}

// NewAuthorizer returns an Authorizer. Key is the configuration key that refusals name, such
// as "authorization.runtime". Refused, which may be nil, is called for each refused call; it
// runs on the connection's own goroutine and must not block.
func NewAuthorizer(key string, policy Policy, refused func(Peer)) *Authorizer {
	a := &Authorizer{key: key, refused: refused, idle: idleTime}
	a.SetPolicy(policy)
	return a
}

// SetPolicy changes the policy for all later calls, also on existing connections.
func (a *Authorizer) SetPolicy(policy Policy) {
	a.policy.Store(&Policy{UIDs: slices.Clone(policy.UIDs), GIDs: slices.Clone(policy.GIDs)})
}

// ServerOptions returns the options by which a gRPC server identifies its peers and enforces
// the policy. The check is gRPC's tap: it runs before any byte of the request is decoded, and
// for every service, health and reflection as well. Connections are bounded, too.
func (a *Authorizer) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.Creds(transport{insecure.NewCredentials(), a}), grpc.InTapHandle(a.tap),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: a.idle})}
}

func (a *Authorizer) allows(who Peer) bool {
	p := a.policy.Load()
	return slices.Contains(p.UIDs, who.UID) || slices.ContainsFunc(p.GIDs, who.inGroup)
}

// stranger is a peer that may not call, or might not when it connected.
type stranger struct {
	conn net.Conn
	who  Peer
}

// connected ends the oldest connection of a peer that may not call, if the new one is of such a peer too.
func (a *Authorizer) connected(conn net.Conn, who Peer) {
	if a.allows(who) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.strangers = slices.DeleteFunc(a.strangers, func(s stranger) bool { return a.allows(s.who) }) // since a reload
	if len(a.strangers) == maxStrangers {
		_ = a.strangers[0].conn.Close()
		a.strangers = a.strangers[1:]
	}
	a.strangers = append(a.strangers, stranger{conn, who})
}

func (a *Authorizer) tap(ctx context.Context, _ *tap.Info) (context.Context, error) {
	who, ok := FromContext(ctx)
	if ok && a.allows(who) {
		return ctx, nil
	}
	if a.refused != nil {
		a.refused(who)
	}
	if !ok {
		return nil, status.Error(codes.PermissionDenied, "the caller has no peer credentials: call over the unix socket")
	}
	return nil, status.Errorf(codes.PermissionDenied,
		"uid %d, gid %d (pid %d) may not call this socket: add the uid to %s.uids or one of its groups to %s.gids of crust-proxy's configuration",
		who.UID, who.GID, who.PID, a.key, a.key)
}
