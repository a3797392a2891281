package peercred

import (
	"errors"
	"fmt"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// maxGroups is the kernel's NGROUPS_MAX.
const maxGroups = 65536

// Of returns the peer of a connection.
func Of(conn *net.UnixConn) (who Peer, err error) {
	err = sys.OnFD(conn, func(fd int) error {
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			return fmt.Errorf("SO_PEERCRED: %w", err)
		}
		groups, err := peerGroups(fd)
		if err != nil {
			return fmt.Errorf("SO_PEERGROUPS: %w", err)
		}
		who = Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid, Groups: groups}
		return nil
	})
	if err != nil {
		return Peer{}, fmt.Errorf("peer credentials: %w", err)
	}
	return who, nil
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

// getGroups is getsockopt(SO_PEERGROUPS), which x/sys/unix lacks. It returns the number of
// groups, also with ERANGE.
func getGroups(fd int, into []uint32) (int, error) {
	size := uint32(len(into) * 4) //nolint:gosec // at most maxGroups
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
		uintptr(unsafe.Pointer(&into[0])), uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // the way to make a system call
	if errno != 0 {
		return int(size / 4), errno
	}
	return int(size / 4), nil
}
