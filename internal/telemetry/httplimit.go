package telemetry

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// Any pod that can reach the address can open connections to it, and each costs a
// descriptor. A peer over its bound is refused, so that it cannot keep out Prometheus and
// kubelet's probes.
const (
	maxConns        = 256
	maxConnsPerPeer = 16
)

// A scrape lists all volumes, and holds the list until the peer has read the answer.
const (
	scrapesAtOnce    = 32
	scrapesOfOnePeer = 4
)

// bound bounds what is done at a time, for all peers and for each of them.
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
	conns openConns
}

func limited(l net.Listener) *limitedListener { return &limitedListener{Listener: l} }

// Accept returns the next connection within the bounds.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		one := &limitedConn{Conn: conn, of: &l.conns, peer: hostOf(conn.RemoteAddr().String())}
		admitted, evicted := l.conns.enter(one)
		if evicted != nil {
			_ = evicted.Conn.Close() // its server has it closed once more
		}
		if admitted {
			return one, nil
		}
		_ = conn.Close() // nothing was said on it
	}
}

// openConns are the open connections of each peer, the oldest first.
type openConns struct {
	mu   sync.Mutex
	all  int
	from map[string][]*limitedConn // by the peer's address
}

// enter admits a connection within the bounds. When all are taken, a peer that has fewer
// connections than another one gets the place of the other's oldest: pods at many addresses
// cannot keep kubelet's probes out, without which it would restart the daemon.
func (o *openConns) enter(conn *limitedConn) (admitted bool, evicted *limitedConn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	own := len(o.from[conn.peer])
	if own >= maxConnsPerPeer {
		return false, nil
	}
	if o.all >= maxConns {
		var most []*limitedConn
		for _, conns := range o.from {
			if len(conns) > len(most) {
				most = conns
			}
		}
		if len(most) <= own {
			return false, nil
		}
		evicted = most[0]
		o.remove(evicted)
	}
	if o.from == nil {
		o.from = make(map[string][]*limitedConn)
	}
	o.from[conn.peer] = append(o.from[conn.peer], conn)
	o.all++
	return true, evicted
}

func (o *openConns) leave(conn *limitedConn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.remove(conn)
}

// remove removes a connection that may be removed already.
func (o *openConns) remove(conn *limitedConn) {
	conns := o.from[conn.peer]
	at := slices.Index(conns, conn)
	if at < 0 {
		return
	}
	o.all--
	if o.from[conn.peer] = slices.Delete(conns, at, at+1); len(conns) == 1 {
		delete(o.from, conn.peer)
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
	of   *openConns
	peer string
}

// Close closes the connection.
func (c *limitedConn) Close() error {
	c.of.leave(c)
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
