package peercred

import (
	"context"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

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
