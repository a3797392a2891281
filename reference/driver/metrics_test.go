package driver

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// scrape reads the metrics as Prometheus does.
func scrape(t *testing.T, socket string) string {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	reply, err := (&http.Client{Transport: transport}).Get("http://driver/metrics")
	check.Must(t, err)
	defer func() { _ = reply.Body.Close() }()
	text, err := io.ReadAll(reply.Body)
	check.Must(t, err)
	return string(text)
}

// TestStreamsAreCounted: those that end well, and those that fail.
func TestStreamsAreCounted(t *testing.T) {
	var socket string
	config, conn, _ := start(t, func(c *Config) {
		c.CopyLimit = 1 << 30
		socket = filepath.Dir(c.DataDir) + "/http.sock"
		c.MetricsListen = "unix:" + socket
	})
	first, later, _ := snapshots(t, conn, config.DataDir+"/images")
	client := csi.NewSnapshotMetadataClient(conn)
	for _, base := range []string{first, "snap-x"} {
		_, _ = deltaOf(client.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: later}))
	}
	check.Succeeds(t, "metrics are served", func() error { _, err := os.Stat(socket); return err })
	text := ""
	check.Eventually(t, "the streams have ended", func() bool {
		text = scrape(t, socket)
		return strings.Contains(text, `crust_driver_metadata_streams{method="GetMetadataDelta"} 0`)
	})
	for _, want := range []string{
		`crust_driver_metadata_streams_total{code="OK",method="GetMetadataDelta"} 1`,
		`crust_driver_metadata_streams_total{code="NotFound",method="GetMetadataDelta"} 1`,
		`crust_driver_metadata_stream_duration_seconds_count{method="GetMetadataDelta"} 2`,
		fmt.Sprintf(`crust_driver_metadata_bytes_total{method="GetMetadataDelta"} %v`, float64(leastSize+block)),
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}

// TestStreamsAreBounded: the one too many is refused, and does not wait.
func TestStreamsAreBounded(t *testing.T) {
	m := &snapshotMetadata{slots: make(chan struct{}, 1)}
	m.slots <- struct{}{}
	if err := m.stream(t.Context(), opened{}, nil, nil, nil); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
}

// TestMetricsAreDocumented: docs/crust-runc.md lists each one.
func TestMetricsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/crust-runc.md")
	check.Must(t, err)
	m := newMetrics()
	m.begin("/x")(codes.OK)
	m.bytes.WithLabelValues("x").Inc()
	families, err := m.registry.Gather()
	check.Must(t, err)
	var named, known []string
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), "crust_driver_") {
			known = append(known, family.GetName())
		}
	}
	for _, found := range regexp.MustCompile("`(crust_driver_\\w+)`").FindAllStringSubmatch(string(page), -1) {
		named = append(named, found[1])
	}
	slices.Sort(named)
	if !slices.Equal(known, named) {
		t.Errorf("docs/crust-runc.md lists %v, and there are %v", named, known)
	}
}
