package telemetry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"
	"golang.org/x/net/netutil"

	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
)

// Server serves metrics and health over HTTP.
type Server struct {
	// Listen is "host:port" or "unix:/path"; empty serves nothing.
	Listen  string
	Metrics prometheus.Gatherer
	// Ready is why the daemon is not ready, or nil.
	Ready func() error
	// Alive is why the daemon has to be restarted, or nil. It ends with its context. Without
	// it the daemon is alive as long as it answers.
	Alive func(ctx context.Context) error
	// Remarks follow the answer "ok" of /readyz, one per line: what does not work, although the daemon serves.
	Remarks func() []string
	Pprof   bool
	// View serves what none of the paths above is, or is nil.
	View http.Handler
	Log  *zap.Logger
	// Retry is how often a listen address that cannot be used is tried again; zero is every five seconds.
	Retry time.Duration

	listener net.Listener // from Bind, until Run serves it
	problem  atomic.Pointer[error]
}

// Bind listens before the daemon reports that it is ready. An address that cannot be used must not stop volumes: it
// becomes the Problem, and Run tries again. Call it before Run or not at all.
func (s *Server) Bind(ctx context.Context) {
	if s.Listen == "" {
		return
	}
	listener, err := s.listen(ctx)
	if err == nil {
		s.listener = listener
		if s.problem.Swap(nil) != nil {
			s.Log.Info("metrics and health are served again", zap.String("listen", s.Listen))
		}
		return
	}
	err = fmt.Errorf("metrics and health are not served, because the address %s cannot be used: %w", s.Listen, err)
	if s.problem.Swap(&err) == nil {
		s.Log.Error("metrics and health are not served; this is tried again", zap.Error(err))
	}
}

// Problem is why metrics and health are not served, or nil.
func (s *Server) Problem() error {
	if err := s.problem.Load(); err != nil {
		return *err
	}
	return nil
}

// Run serves until ctx ends. While the address cannot be used, it tries again.
func (s *Server) Run(ctx context.Context) error {
	if s.Listen == "" {
		<-ctx.Done()
		return nil
	}
	for ctx.Err() == nil {
		if s.listener == nil {
			s.Bind(ctx)
		}
		if listener := s.listener; listener != nil {
			s.listener = nil
			s.serve(ctx, listener)
		}
		select {
		case <-ctx.Done():
		case <-time.After(cmp.Or(s.Retry, 5*time.Second)):
		}
	}
	return nil
}

func (s *Server) serve(ctx context.Context, listener net.Listener) {
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: headerTime, ReadTimeout: 10 * time.Second,
		WriteTimeout: s.writeTime(), MaxHeaderBytes: 16 << 10, ConnState: (&peers{open: make(map[string][]net.Conn)}).changed,
	}
	server.SetKeepAlivesEnabled(false) // a connection that repeated requests would keep its place for ever
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
		defer cancel()
		if server.Shutdown(limit) != nil {
			_ = server.Close()
		}
	}()
	if err := server.Serve(netutil.LimitListener(listener, maxConns)); !errors.Is(err, http.ErrServerClosed) {
		err = fmt.Errorf("metrics and health are not served any more: %w", err)
		s.problem.Store(&err)
		s.Log.Error("metrics and health are not served any more; this is tried again", zap.Error(err))
		cancel()
	}
	<-stopped
}

// Any pod that can reach the address can open connections to it, and each costs a descriptor.
// More than maxConns wait until others end, those without a request after headerTime. One address has
// maxPerPeer, of which the oldest one ends for a new one: kubelet kills a daemon that its probes do not reach, and
// neither a pod nor a program with kubelet's own address shall bring that about.
const (
	maxConns   = 256
	maxPerPeer = 16
	headerTime = 5 * time.Second
)

// peers counts the open connections of each address.
type peers struct {
	mu   sync.Mutex
	open map[string][]net.Conn
}

// changed closes the oldest connection of an address that has more than maxPerPeer. Those of a unix socket have none.
func (p *peers) changed(conn net.Conn, state http.ConnState) {
	peer, _, err := net.SplitHostPort(conn.RemoteAddr().String())
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch state {
	case http.StateNew:
		if all := p.open[peer]; len(all) == maxPerPeer {
			_ = all[0].Close()
			p.open[peer] = all[1:]
		}
		p.open[peer] = append(p.open[peer], conn)
	case http.StateClosed, http.StateHijacked:
		p.open[peer] = slices.DeleteFunc(p.open[peer], func(one net.Conn) bool { return one == conn })
		if len(p.open[peer]) == 0 {
			delete(p.open, peer)
		}
	case http.StateActive, http.StateIdle:
	}
}

// maxScrapes bounds scrapes: each lists all volumes, and holds the list until the peer has read it.
const maxScrapes = 32

// writeTime bounds how long a reader may take. A profile takes as long as its request says.
func (s *Server) writeTime() time.Duration {
	if s.Pprof {
		return 2 * time.Minute
	}
	return 20 * time.Second
}

func (s *Server) listen(ctx context.Context) (net.Listener, error) {
	if path, isUnix := strings.CutPrefix(s.Listen, "unix:"); isUnix {
		return peercred.Listen(path, 0o600, "")
	}
	return new(net.ListenConfig).Listen(ctx, "tcp", s.Listen)
}

func (s *Server) handler() http.Handler {
	if s.Remarks == nil {
		s.Remarks = func() []string { return nil }
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.Metrics, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, req *http.Request) { answer(w, s.alive(req.Context())) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, s.Ready(), s.Remarks()...) })
	if s.View != nil {
		mux.Handle("GET /", s.View)
	}
	if s.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	}
	return mux
}

// aliveTime is less than a probe of the DaemonSet waits, so that it gets the reason.
const aliveTime = 3 * time.Second

func (s *Server) alive(ctx context.Context) error {
	if s.Alive == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, aliveTime)
	defer cancel()
	return s.Alive(ctx)
}

func answer(w http.ResponseWriter, err error, remarks ...string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = fmt.Fprintln(w, err)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
	for _, remark := range remarks {
		_, _ = fmt.Fprintln(w, remark)
	}
}
