// Package peercred identifies the peers of unix sockets by the credentials that the kernel
// recorded, and admits only those that the configuration names.
package peercred

import (
	"context"
	"slices"

	"google.golang.org/grpc/peer"
)

// Peer is the process that connected: the credentials that the kernel recorded when the
// connection was made.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
	// Groups are the supplementary groups.
	Groups []uint32
}

func (p Peer) inGroup(gid uint32) bool {
	return p.GID == gid || slices.Contains(p.Groups, gid)
}

// FromContext returns the peer of a gRPC call.
func FromContext(ctx context.Context) (Peer, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Peer{}, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Peer, ok
}
