// Package peercred identifies the peers of unix sockets by the credentials that the kernel
// recorded, and admits only those that the configuration names.
package peercred

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

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
	return conn, AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, Peer: who}, nil
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
