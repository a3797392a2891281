package scan

import (
	"net"
	"os"
	"strconv"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// initialPIDs is the machine's own PID namespace, as the kernel's <linux/proc_ns.h>
// numbers it.
const initialPIDs = "pid:[4026531836]"

// peerTime bounds the connection to a local socket.
const peerTime = 200 * time.Millisecond

// Blind returns why this process does not see the other processes of the node, or nil: a
// container sees only its own, unless it has the node's PID namespace. On a node that is a
// container itself, kubelet or the container runtime prove that: the kernel tells the PID of
// the process behind a socket only to those who can see that process.
func (s *Scanner) Blind() error {
	if s.sees.Load() {
		return nil
	}
	if _, err := os.Stat(s.proc + "/1"); err != nil { //nolint:gosec // below /proc
		return hiddenError(err)
	}
	ns, err := os.Readlink(s.proc + "/self/ns/pid")
	if err != nil || ns == initialPIDs {
		return err
	}
	for _, socket := range s.sockets {
		if s.seesPeer(socket) {
			s.sees.Store(true)
			return nil
		}
	}
	return errBlind
}

// seesPeer reports whether the process that listens on a socket can be seen, and is neither
// this one nor a child of it.
func (s *Scanner) seesPeer(socket string) bool {
	conn, err := net.DialTimeout("unix", socket, peerTime) //nolint:gosec // of the configuration
	if err != nil {
		return false
	}
	defer func() { _ = conn.Close() }()
	peer, err := sys.Peer(conn)
	if err != nil || peer.Pid <= 0 || int(peer.Pid) == os.Getpid() {
		return false
	}
	stat := statOf(s.proc + "/" + strconv.Itoa(int(peer.Pid)))
	return len(stat) > 1 && stat[1] != strconv.Itoa(os.Getpid())
}
