// Package monitoring makes the files of deploy/monitoring: alert rules, a
// dashboard, and a list of the metrics that both are made of. It is no part of any
// program.
package monitoring

import (
	"context"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/test/bufconn"

	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/front/passthrough"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// Metric is one metric of the daemon.
type Metric struct {
	Name string `json:"name"`
	// Type is counter, gauge or histogram.
	Type   string   `json:"type"`
	Help   string   `json:"help"`
	Labels []string `json:"labels,omitempty"`
	// Values are all that a label can have, for labels of which that is known.
	Values map[string][]string `json:"values,omitempty"`
}

// ofTheProcess are the metrics of Go and of the process that are shown; there are
// many more.
var ofTheProcess = []string{
	"go_goroutines", "process_cpu_seconds_total", "process_max_fds", "process_open_fds",
	"process_resident_memory_bytes", "process_start_time_seconds",
}

// Catalog gives the daemon's own metrics, and those of the process that are shown,
// as the daemon's registry gives them when every metric has a value.
func Catalog() ([]Metric, error) {
	m := observe.NewMetrics("v0.0.0")
	if err := useAll(m); err != nil {
		return nil, err
	}
	families, err := m.Registry.Gather()
	if err != nil {
		return nil, fmt.Errorf("gather metrics: %w", err)
	}
	var out []Metric
	for _, family := range families {
		if !isOurs(family.GetName()) && !slices.Contains(ofTheProcess, family.GetName()) {
			continue
		}
		made := Metric{Name: family.GetName(), Type: strings.ToLower(family.GetType().String()), Help: family.GetHelp()}
		labels := make(map[string]bool)
		for _, child := range family.GetMetric() {
			for _, pair := range child.GetLabel() {
				labels[pair.GetName()] = true
			}
		}
		out = append(out, made.with(slices.Sorted(maps.Keys(labels))))
	}
	return out, allUsed(m.Registry, out)
}

// isOurs tells the daemon's metrics from those that every Go program has.
func isOurs(name string) bool {
	return !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_")
}

var nameInDesc = regexp.MustCompile(`fqName: "([^"]+)"`)

// allUsed finds metrics that are registered and were given no value: of those the
// registry shows nothing.
func allUsed(registry *prometheus.Registry, known []Metric) error {
	descs := make(chan *prometheus.Desc)
	go func() { registry.Describe(descs); close(descs) }()
	var missing []string
	for desc := range descs {
		found := nameInDesc.FindStringSubmatch(desc.String())
		if found == nil || !isOurs(found[1]) {
			continue
		}
		if !slices.ContainsFunc(known, func(m Metric) bool { return m.Name == found[1] }) {
			missing = append(missing, found[1])
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("metrics without a value: %v: give them one in internal/monitoring/catalog.go", missing)
	}
	return nil
}

// with gives the metric with its labels, and what is known of their values.
func (m Metric) with(labels []string) Metric {
	m.Labels = labels
	for _, label := range labels {
		if known := valuesOf(m.Name, label); known != nil {
			if m.Values == nil {
				m.Values = make(map[string][]string)
			}
			m.Values[label] = known
		}
	}
	return m
}

// valuesOf gives what a label can be, or nil where that is not known.
func valuesOf(metric, label string) []string {
	switch label {
	case "code":
		return gRPCCodes()
	case "service", "method":
		return methods(label == "service")
	case "reason":
		return kinds()
	case "state":
		return volumeStates()
	case "result":
		if metric == "crust_proxy_reconcile_repairs_total" {
			return []string{"ok", "failed"}
		}
		return append([]string{"ok"}, kinds()...)
	case "party":
		return parties()
	case "source":
		return slices.Sorted(maps.Keys(sources))
	}
	return nil
}

// sources are what the daemon follows; see observe.NodeState.
var sources = map[string]bool{"sandboxes": true, "pods": true, "runtimeclasses": true, "csidrivers": true}

func gRPCCodes() []string {
	var out []string
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		out = append(out, code.String())
	}
	return out
}

func kinds() []string {
	var out []string
	for kind := deferral.Internal; kind.String() != "unknown"; kind++ {
		out = append(out, kind.String())
	}
	return out
}

func parties() []string {
	var out []string
	for _, party := range []deferral.Party{
		deferral.PartyPolicy, deferral.PartyPod, deferral.PartyPods, deferral.PartyVolume, deferral.PartyHandler,
		deferral.PartyDriver, deferral.PartyDevice, deferral.PartyRequest, deferral.PartyNode,
	} {
		out = append(out, string(party))
	}
	return out
}

func volumeStates() []string {
	var out []string
	for _, name := range adminv1.VolumeState_name {
		if state := strings.ToLower(strings.TrimPrefix(name, "VOLUME_STATE_")); state != "unspecified" {
			out = append(out, state)
		}
	}
	slices.Sort(out)
	return out
}

// methods are the methods, or the services, that the daemon serves.
func methods(services bool) []string {
	known := map[string]bool{"other": true}
	add := func(service, method string) {
		if services {
			method = service
		}
		known[method] = true
	}
	for full := range passthrough.UnaryMethods() {
		service, method, _ := strings.Cut(strings.TrimPrefix(full, "/"), "/")
		add(service, method)
	}
	for _, service := range []*grpc.ServiceDesc{&runtimev1.Runtime_ServiceDesc, &adminv1.Admin_ServiceDesc, &healthv1.Health_ServiceDesc} {
		for _, method := range service.Methods {
			add(service.ServiceName, method.MethodName)
		}
		for _, stream := range service.Streams {
			add(service.ServiceName, stream.StreamName)
		}
	}
	return slices.Sorted(maps.Keys(known))
}

// useAll gives every metric a value, in the ways by which the daemon does.
func useAll(m *observe.Metrics) error {
	const driver, handler = "driver.example.com", "kata"
	m.ClaimRefused(deferral.InUse.String())
	m.CallerDenied()
	m.Repaired("retract", true)
	m.Published(driver, handler)
	m.SandboxAsked(handler, "stats", "ok", time.Millisecond)
	m.DriverBypassed(driver, true)
	m.VolumeRefused(driver, string(deferral.PartyPolicy))
	asked, err := m.WatchCluster(func() observe.ClusterState { return observe.ClusterState{LastHeard: time.Unix(1, 0), Pods: 1} })
	if err != nil {
		return err
	}
	asked("pod", "ok", time.Millisecond)
	volumes := []observe.VolumeCount{{State: "bound", Driver: driver, Handler: handler, Count: 1}}
	if err := m.CountVolumes(func() []observe.VolumeCount { return volumes }); err != nil {
		return err
	}
	err = m.WatchNode(func() observe.NodeState {
		return observe.NodeState{
			ConfigGood: true, Sources: sources, Handlers: map[string]bool{handler: true}, Drivers: map[string]bool{driver: true},
			Abnormal: volumes,
		}
	})
	if err != nil {
		return err
	}
	return call(m)
}

// call lets one call go through the interceptors.
func call(m *observe.Metrics) error {
	interceptors := &observe.Interceptors{Log: zap.NewNop(), Metrics: m}
	server := grpc.NewServer(interceptors.Options()...)
	healthv1.RegisterHealthServer(server, healthv1.UnimplementedHealthServer{})
	listener := bufconn.Listen(1 << 10)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, _ = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{}) // refused, and counted
	_ = conn.Close()
	server.GracefulStop()
	return <-served
}
