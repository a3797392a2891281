//go:build system

package front

import (
	"context"
	"fmt"
	"net"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// TestEventsOfAVolume: its whole life is told, also after a kill of the daemon and after the volume has gone, and no
// secret.
func TestEventsOfAVolume(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 400*mib)
	v.Secrets = map[string]string{"passphrase": "hunter2xyz"}
	check.Must(t, n.stage(v))
	n.up(v, "pod-1")
	check.Must(t, n.publish(v, "pod-1")) // kubelet repeats it
	sandbox := n.boot("sandbox-1", v, "pod-1")
	check.Must(t, check.Err(n.stats(v, "pod-1")))
	for range 3 {
		check.Code(t, n.publish(v, "pod-2"), codes.FailedPrecondition, "wait until the other pod is gone")
	}
	check.Code(t, n.unpublish(v, "pod-1"), codes.Aborted)
	file := path.Join(n.Dir, "run/state/events.pb")
	check.Eventually(t, "the events are written", func() bool {
		raw, _ := os.ReadFile(file)
		return strings.Contains(string(raw), "unpublish failed")
	})
	n.Kill()
	n.Start()
	n.waitServed()
	n.end(sandbox)
	check.Must(t, n.unpublish(v, "pod-1"))
	n.down(v, "pod-2")
	n.wantClean()
	var told []string
	got := check.Value(n.Admin().ListEvents(t.Context(), &adminv1.ListEventsRequest{Volume: v.ID}))(t)
	for _, e := range slices.Backward(got.GetEvents()) {
		told = append(told, fmt.Sprintf("%d %s by %s", e.GetCount(), e.GetWhat(), e.GetBy()))
		check.That(t, e.GetDriver() == driverName && e.GetVolumeId() == v.ID, "an event is of another volume: %v", e)
	}
	want := []string{
		"1 staged by kubelet", "1 published by kubelet", "1 bound by sandbox", "3 refused by kubelet", "1 unpublish failed by kubelet",
		"1 unbound by sandbox", "1 unpublished by kubelet", "1 unpublished by kubelet", "1 unstaged by kubelet",
	}
	told = slices.DeleteFunc(told, func(text string) bool { return strings.Contains(text, "repair") })
	check.That(t, slices.Equal(told, want), "told was\n%s\nwant\n%s", strings.Join(told, "\n"), strings.Join(want, "\n"))
	for _, name := range []string{v.TargetOf("pod-1"), v.Name, "pod-1"} {
		other, err := n.Admin().ListEvents(t.Context(), &adminv1.ListEventsRequest{Volume: name})
		check.That(t, err == nil && len(other.GetEvents()) == len(got.GetEvents()), "%s has %d events, %v", name, len(other.GetEvents()), err)
	}
	out := check.Value(n.Crustctl("events", v.TargetOf("pod-1")).Output())(t)
	check.That(t, strings.Contains(string(out), "sandbox-1 kata-go"), "crustctl shows\n%s", out)
	raw := check.Value(os.ReadFile(file))(t)
	check.That(t, !strings.Contains(string(raw)+string(out), "hunter2xyz"), "the secret is in the events")
}

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
	got, listener := &spans{}, check.Value((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, got)
	rpctest.ServeOn(t, listener, server)
	n := newNode(t, deferAll+"\ntracing: {insecure: true, endpoint: \""+listener.Addr().String()+"\"}\n")
	v := n.create("pv-1", "ext4", 400*mib)
	n.up(v, "pod-1")
	sandbox := n.boot("sandbox-1", v, "pod-1")
	check.Must(t, check.Err(n.stats(v, "pod-1")))
	n.end(sandbox)
	n.down(v, "pod-1")
	check.Eventually(t, "the first spans have come", func() bool { steps, _ := got.below("NodeStageVolume"); return steps != nil })
	n.Stop() // it sends what is left, and waits for that no longer than three seconds
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
