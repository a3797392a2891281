package telemetry

import (
	"net"
	"sync"
)

// Any pod that can reach the address can open connections to it, and each costs a
// descriptor. A peer over its bound is refused, so that it does not keep Prometheus
// and kubelet's probes out.
const (
	maxConns        = 256
	maxConnsPerPeer = 16
)

// limitedListener closes connections over the bounds at once.
type limitedListener struct {
	net.Listener

	mu   sync.Mutex
	open int
	from map[string]int // open connections, by the peer's address
}

func limited(l net.Listener) *limitedListener {
	return &limitedListener{Listener: l, from: make(map[string]int)}
}

// Accept gives the next connection within the bounds.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := peerHost(conn)
		if l.enter(peer) {
			return &limitedConn{Conn: conn, left: sync.OnceFunc(func() { l.leave(peer) })}, nil
		}
		_ = conn.Close() // nothing was said on it
	}
}

// peerHost is the peer's address without its port; all peers of a unix socket are
// one, which only root can reach.
func peerHost(conn net.Conn) string {
	host, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		return ""
	}
	return host
}

func (l *limitedListener) enter(peer string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= maxConns || l.from[peer] >= maxConnsPerPeer {
		return false
	}
	l.open++
	l.from[peer]++
	return true
}

func (l *limitedListener) leave(peer string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.from[peer]--; l.from[peer] == 0 {
		delete(l.from, peer)
	}
}

type limitedConn struct {
	net.Conn
	left func()
}

// Close closes the connection.
func (c *limitedConn) Close() error {
	defer c.left()
	return c.Conn.Close()
}
