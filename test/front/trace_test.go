//go:build system

package front

import (
	"context"
	"net"
	"path"
	"slices"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// spans is a collector of OpenTelemetry.
type spans struct {
	collector.UnimplementedTraceServiceServer
	mu  sync.Mutex
	got []*tracev1.Span
}

// Export takes spans.
func (s *spans) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range req.GetResourceSpans() {
		for _, in := range of.GetScopeSpans() {
			s.got = append(s.got, in.GetSpans()...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// below returns the names of the spans that a call of this method had below it, in order.
func (s *spans) below(method string) (names []string, attributes map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.got, func(span *tracev1.Span) bool { return span.GetName() == "csi.v1.Node/"+method })
	if at < 0 {
		return nil, nil
	}
	attributes = make(map[string]string)
	for _, one := range s.got[at].GetAttributes() {
		attributes[one.GetKey()] = one.GetValue().GetStringValue()
	}
	inside := map[string]bool{string(s.got[at].GetSpanId()): true}
	slices.SortFunc(s.got, func(a, b *tracev1.Span) int { return int(a.GetStartTimeUnixNano()) - int(b.GetStartTimeUnixNano()) })
	for _, span := range s.got {
		if inside[string(span.GetParentSpanId())] {
			inside[string(span.GetSpanId())] = true
			names = append(names, path.Base(span.GetName()))
		}
	}
	return names, attributes
}

// TestATraceShowsWhereAPublishIs: the steps of a call are below it, in order.
func TestATraceShowsWhereAPublishIs(t *testing.T) {
	t.Parallel()
	got := &spans{}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	check.Must(t, err)
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, got)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	n := newNode(t, deferAll+"\ntracing: {insecure: true, endpoint: \""+listener.Addr().String()+"\"}\n")
	v := n.create("pv-1", "ext4", 400*mib)
	n.up(v, "pod-1")
	sandbox := n.boot("sandbox-1", v, "pod-1")
	_, err = n.stats(v, "pod-1")
	check.Must(t, err)
	n.end(sandbox)
	n.down(v, "pod-1")
	n.Stop() // it sends what is left
	for method, want := range map[string][]string{
		"NodeStageVolume":     {"NodeStageVolume"},
		"NodePublishVolume":   {"NodePublishVolume", "claim", "prepare the filesystem", "project"},
		"NodeGetVolumeStats":  {"ask the sandbox"},
		"NodeUnpublishVolume": {"prove that nobody uses it", "NodeUnpublishVolume"},
		"NodeUnstageVolume":   {"NodeUnstageVolume"},
	} {
		steps, attributes := got.below(method)
		steps = slices.DeleteFunc(steps, func(name string) bool { return name == "NodeGetCapabilities" })
		check.That(t, slices.Equal(steps, want), "%s has the steps %q, want %q", method, steps, want)
		check.That(t, attributes["crust.csi_volume_id"] == v.ID, "%s is about %v", method, attributes)
	}
}
