package daemon

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// nodeWith serves the metrics of a daemon with these volumes.
func nodeWith(t *testing.T, volumes ...telemetry.VolumeCount) (address string) {
	t.Helper()
	metrics := telemetry.NewMetrics("test")
	metrics.WatchNode(func() telemetry.NodeState { return telemetry.NodeState{Volumes: volumes} })
	return served(t, promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
}

func served(t *testing.T, handler http.Handler) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// nodeWithStaged serves the metrics of a daemon whose front has a device staged of each of
// these CSI volumes.
func nodeWithStaged(t *testing.T, badFront error, published []deferral.Status, ids ...string) (address string) {
	t.Helper()
	var staged []staging.Staged
	for _, id := range ids {
		staged = append(staged, staging.Staged{Driver: "ebs.csi.aws.com", VolumeID: id, Path: "/k/staging"})
	}
	onRecord := &volumes{badFront: badFront, staged: func() []staging.Staged { return staged }}
	metrics := telemetry.NewMetrics("test")
	metrics.WatchNode(func() telemetry.NodeState { return telemetry.NodeState{Staged: onRecord.stagedOnly(published)} })
	return served(t, promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
}

func askMain(t *testing.T, args ...string) (code int, said string) {
	t.Helper()
	var out, complaints strings.Builder
	code = Main(args, &out, &complaints)
	return code, out.String() + complaints.String()
}

func TestNodesAreAskedWhetherVolumesLive(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	published := []deferral.Status{{Volume: &volume.Volume{Driver: "ebs.csi.aws.com", Origin: &volume.Origin{VolumeID: "vol-1"}}}}
	kept := telemetry.VolumeCount{State: "bound", Driver: "ebs.csi.aws.com", Handler: "kata", Count: 2}
	for address, want := range map[string][]string{
		nodeWith(t): {"0", "No deferred volume lives on any of 1 nodes", "has no address was not asked"},
		nodeWith(t, telemetry.VolumeCount{State: "adopted", Driver: "x", Handler: "kata", Count: 1}): {"0", "any of 1 nodes"},
		nodeWith(t, telemetry.VolumeCount{State: "refused", Driver: "x", Count: 4}):                  {"0", "any of 1 nodes"},
		nodeWith(t, kept, telemetry.VolumeCount{State: "removing", Driver: "b", Handler: "kata", Count: 1}): {
			"1", "node 127.0.0.1: 3 deferred volume(s) live there, of b, ebs.csi.aws.com", "crustctl list",
		},
		nodeWithStaged(t, nil, published, "vol-1"):             {"0", "any of 1 nodes"}, // counted as a volume
		nodeWithStaged(t, nil, published, "vol-1", "vol-2"):    {"1", "node 127.0.0.1: 1 deferred volume(s) live there, of ebs.csi.aws.com", "crust-proxy removable"},
		nodeWithStaged(t, errors.New("a damaged record"), nil): {"1", "node 127.0.0.1: 1 deferred volume(s) live there, of unknown"},
		closed.Addr().String():                                 {"1", "node 127.0.0.1: its crust-proxy cannot be asked"},
		served(t, http.NotFoundHandler()):                      {"1", "the answer is 404"},
		served(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "up 1") })):   {"1", "is no crust-proxy"},
		served(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "<html>") })): {"1", "cannot be read"},
		"127.0.0.1":               {"1", "is not host:port"},
		"no-such-host.invalid:80": {"1", "no node can be asked"},
	} {
		code, said := askMain(t, "removable-nodes", address)
		for _, word := range want[1:] {
			if !strings.Contains(said, word) {
				t.Errorf("%s: %q is not in %q", address, word, said)
			}
		}
		if fmt.Sprint(code) != want[0] {
			t.Errorf("%s: the exit code is %d, want %s", address, code, want[0])
		}
	}
}

func TestARefusalNamesTheWayBack(t *testing.T) {
	repair := "helm rollback crust-proxy 3 --namespace=ns"
	kept := nodeWith(t, telemetry.VolumeCount{State: "bound", Driver: "d", Handler: "kata", Count: 1})
	for _, address := range []string{kept, "no-such-host.invalid:80"} {
		if code, said := askMain(t, "removable-nodes", address, repair); code != 1 || !strings.Contains(said, "\n  "+repair+"\n") {
			t.Errorf("%s: %d, %s", address, code, said)
		}
	}
	if code, said := askMain(t, "removable-nodes", nodeWith(t), repair); code != 0 || strings.Contains(said, repair) {
		t.Errorf("without volumes: %d, %s", code, said)
	}
}
