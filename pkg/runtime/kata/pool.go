package kata

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

const (
	idlePerSocket = 4
	idleTotal     = 512
	idleFor       = time.Minute
)

// pool keeps connections to shims between calls: dialling costs more than the
// call. It keeps none until somebody sweeps it, so that none is left behind.
type pool struct {
	mu      sync.Mutex
	sweeper bool
	total   int
	idle    map[string][]*conn // by socket, the last used last
}

func newPool() *pool { return &pool{idle: make(map[string][]*conn)} }

func (p *pool) get(ctx context.Context, socket string) (*conn, error) {
	p.mu.Lock()
	kept := p.idle[socket]
	last := len(kept) - 1
	if last < 0 {
		p.mu.Unlock()
		return dial(ctx, socket)
	}
	defer p.mu.Unlock()
	c := kept[last]
	p.idle[socket] = slices.Delete(kept, last, last+1)
	p.total--
	c.kept = true
	return c, nil
}

// put keeps a connection whose last reply was read to its end.
func (p *pool) put(c *conn) {
	c.since = time.Now()
	p.mu.Lock()
	keep := p.sweeper && p.total < idleTotal && len(p.idle[c.socket]) < idlePerSocket
	if keep {
		p.idle[c.socket] = append(p.idle[c.socket], c)
		p.total++
	}
	p.mu.Unlock()
	if !keep {
		c.close()
	}
}

func (p *pool) drop(socket string) {
	p.mu.Lock()
	kept := p.idle[socket]
	delete(p.idle, socket)
	p.total -= len(kept)
	p.mu.Unlock()
	closeAll(kept)
}

func (p *pool) sweep(now time.Time) {
	var old []*conn
	p.mu.Lock()
	for socket, kept := range p.idle {
		kept = slices.DeleteFunc(kept, func(c *conn) bool {
			isOld := now.Sub(c.since) >= idleFor
			if isOld {
				old = append(old, c)
			}
			return isOld
		})
		if p.idle[socket] = kept; len(kept) == 0 {
			delete(p.idle, socket)
		}
	}
	p.total -= len(old)
	p.mu.Unlock()
	closeAll(old)
}

func (p *pool) run(ctx context.Context) {
	p.setSweeper(true)
	defer p.sweep(time.Now().Add(2 * idleFor))
	defer p.setSweeper(false)
	tick := time.NewTicker(idleFor / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			p.sweep(now)
		}
	}
}

func (p *pool) setSweeper(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sweeper = on
}

func closeAll(conns []*conn) {
	for _, c := range conns {
		c.close()
	}
}

// dial connects to a shim. A shim that is too busy to accept, its queue full,
// is waited for: it is alive.
func dial(ctx context.Context, socket string) (*conn, error) {
	var dialer net.Dialer
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		raw, err := dialer.DialContext(ctx, "unix", socket)
		if err == nil {
			return &conn{Conn: raw, socket: socket}, nil
		}
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
			<-ctx.Done() // the dialer's own timer, which has ctx's deadline, can fire just before that of ctx
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		if !sys.Sleep(ctx, wait) {
			return nil, ctx.Err()
		}
	}
}
