package observe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/crust-proxy/crust-proxy/internal/peercred"
)

// Server serves metrics and health over HTTP.
type Server struct {
	// Listen is "host:port" or "unix:/path"; empty serves nothing.
	Listen  string
	Metrics *Metrics
	// Ready tells why the daemon is not ready, or nil.
	Ready func() error
	// Remarks are told with "ready", each on a line: what does not work, and keeps
	// nobody from serving. It may be nil.
	Remarks func() []string
	Pprof   bool
}

// Run serves until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	if s.Listen == "" {
		<-ctx.Done()
		return nil
	}
	listener, err := s.listen(ctx)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", s.Listen, err)
	}
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 2 * time.Minute, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
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
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-stopped
	return nil
}

func (s *Server) listen(ctx context.Context) (net.Listener, error) {
	var config net.ListenConfig
	path, isUnix := strings.CutPrefix(s.Listen, "unix:")
	if !isUnix {
		return config.Listen(ctx, "tcp", s.Listen)
	}
	return peercred.Listen(path, 0o600, "")
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.Metrics.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, s.Ready(), s.remarks()...) })
	if s.Pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	}
	return mux
}

func (s *Server) remarks() []string {
	if s.Remarks == nil {
		return nil
	}
	return s.Remarks()
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
