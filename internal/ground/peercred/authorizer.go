package peercred

import (
	"context"
	"slices"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

// Policy is who may call: one of the users, or a member of one of the groups.
type Policy struct {
	UIDs []uint32
	GIDs []uint32
}

// Authorizer enforces a policy on the calls of one server.
type Authorizer struct {
	key     string
	refused func(Peer)
	policy  atomic.Pointer[Policy]
}

// NewAuthorizer returns an Authorizer. Key is the configuration key that refusals name, such
// as "authorization.runtime". Refused, which may be nil, is called for each refused call; it
// runs on the connection's own goroutine and must not block.
func NewAuthorizer(key string, policy Policy, refused func(Peer)) *Authorizer {
	a := &Authorizer{key: key, refused: refused}
	a.SetPolicy(policy)
	return a
}

// SetPolicy changes the policy for all later calls, also on existing connections.
func (a *Authorizer) SetPolicy(policy Policy) {
	a.policy.Store(&Policy{UIDs: slices.Clone(policy.UIDs), GIDs: slices.Clone(policy.GIDs)})
}

// ServerOptions returns the options by which a gRPC server identifies its peers and enforces
// the policy. The check is gRPC's tap: it runs before any byte of the request is decoded, and
// for every service, health and reflection as well.
func (a *Authorizer) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.Creds(Credentials()), grpc.InTapHandle(a.tap)}
}

func (a *Authorizer) tap(ctx context.Context, _ *tap.Info) (context.Context, error) {
	who, ok := FromContext(ctx)
	if p := a.policy.Load(); ok && (slices.Contains(p.UIDs, who.UID) || slices.ContainsFunc(p.GIDs, who.inGroup)) {
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
