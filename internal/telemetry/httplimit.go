package telemetry

import (
	"net"
	"net/http"
	"sync"
)

// Any pod that can reach the address can open connections to it, and each costs a
// descriptor. A peer over its bound is refused, so that it does not keep Prometheus
// and kubelet's probes out.
const (
	maxConns        = 256
	maxConnsPerPeer = 16
)

// A scrape makes a list of all volumes, and holds it until the peer has read the answer.
const (
	scrapesAtOnce    = 32
	scrapesOfOnePeer = 4
)

// bound bounds what is done at a time, for all peers and for each.
type bound struct {
	most, mostOfOne int

	mu   sync.Mutex
	all  int
	from map[string]int // by the peer's address
}

func newBound(most, mostOfOne int) *bound {
	return &bound{most: most, mostOfOne: mostOfOne, from: make(map[string]int)}
}

func (b *bound) enter(peer string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all >= b.most || b.from[peer] >= b.mostOfOne {
		return false
	}
	b.all++
	b.from[peer]++
	return true
}

func (b *bound) leave(peer string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all--
	if b.from[peer]--; b.from[peer] == 0 {
		delete(b.from, peer)
	}
}

// limitedListener closes connections over the bounds at once.
type limitedListener struct {
	net.Listener
	conns *bound
}

func limited(l net.Listener) *limitedListener {
	return &limitedListener{Listener: l, conns: newBound(maxConns, maxConnsPerPeer)}
}

// Accept gives the next connection within the bounds.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := hostOf(conn.RemoteAddr().String())
		if l.conns.enter(peer) {
			return &limitedConn{Conn: conn, left: sync.OnceFunc(func() { l.conns.leave(peer) })}, nil
		}
		_ = conn.Close() // nothing was said on it
	}
}

// hostOf is a peer's address without its port; all peers of a unix socket are one, which
// only root can reach.
func hostOf(peer string) string {
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		return ""
	}
	return host
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

// limitedScrapes refuses scrapes over the bounds.
func limitedScrapes(scrape http.Handler) http.Handler {
	scrapes := newBound(scrapesAtOnce, scrapesOfOnePeer)
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		peer := hostOf(req.RemoteAddr)
		if !scrapes.enter(peer) {
			http.Error(w, "too many scrapes at a time", http.StatusServiceUnavailable)
			return
		}
		defer scrapes.leave(peer)
		scrape.ServeHTTP(w, req)
	})
}
