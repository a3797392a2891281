package telemetry_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const root = "../../.."

func readFile(t *testing.T, path string) string {
	t.Helper()
	return string(check.Value(os.ReadFile(root + "/" + path))(t))
}

var (
	descForm  = regexp.MustCompile(`fqName: "([^"]+)".*constLabels: \{(.*)\}, variableLabels: \{([^}]*)\}`)
	constForm = regexp.MustCompile(`(\w+)="`)
)

// registered lists the daemon's own metrics, each with its sorted labels. Metrics of the
// Go runtime and of the process are left out.
func registered(t *testing.T) map[string]string {
	t.Helper()
	m := telemetry.NewMetrics("v0.0.0")
	m.WatchNode(func() telemetry.NodeState { return telemetry.NodeState{} })
	descs := make(chan *prometheus.Desc)
	go func() { m.Registry.Describe(descs); close(descs) }()
	out := make(map[string]string)
	for desc := range descs {
		found := descForm.FindStringSubmatch(desc.String())
		check.Require(t, found != nil, "the description %s has an unknown form", desc)
		if strings.HasPrefix(found[1], "go_") || strings.HasPrefix(found[1], "process_") {
			continue
		}
		labels := slices.DeleteFunc(strings.Split(found[3], ","), func(label string) bool { return label == "" })
		for _, label := range constForm.FindAllStringSubmatch(found[2], -1) {
			labels = append(labels, label[1])
		}
		slices.Sort(labels)
		out[found[1]] = strings.Join(labels, ", ")
	}
	return out
}

// TestOperationsListsEveryMetric: the table in docs/operations.md is the one list of
// metrics that people, and the checks of alerts, dashboard and pages, go by.
func TestOperationsListsEveryMetric(t *testing.T) {
	rows := make(map[string]string)
	for _, found := range regexp.MustCompile("(?m)^\\| `((?:crust_proxy_|volumes_)\\w+)` \\| ([^|]*)\\|").FindAllStringSubmatch(readFile(t, "docs/operations.md"), -1) {
		labels := strings.Split(strings.TrimSpace(found[2]), ", ")
		slices.Sort(labels)
		rows[found[1]] = strings.Join(labels, ", ")
	}
	known := registered(t)
	check.Require(t, len(known) >= 20, "only %d metrics are registered", len(known))
	for name, labels := range known {
		listed, there := rows[name]
		check.That(t, there && listed == labels, "docs/operations.md does not list %s with the labels %q (but %q)", name, labels, listed)
	}
	for name := range rows {
		_, there := known[name]
		check.That(t, there, "docs/operations.md lists %s, which the daemon does not have", name)
	}
}

// TestQueriesNameKnownValues: an alert that asks for a value which a label never has
// never fires. The names of metrics and labels are checked by tools/prometheus.
func TestQueriesNameKnownValues(t *testing.T) {
	known := map[string]map[string]bool{
		"source": {"sandboxes": true, "pods": true, "runtimeclasses": true, "csidrivers": true},
		"result": {"ok": true, "failed": true}, "state": {}, "method": {},
	}
	for kind := volume.Internal; kind.String() != "unknown"; kind++ {
		known["result"][kind.String()] = true
	}
	for _, name := range adminv1.VolumeState_name {
		known["state"][strings.ToLower(strings.TrimPrefix(name, "VOLUME_STATE_"))] = true
	}
	for full := range passthrough.UnaryMethods() {
		known["method"][full[strings.LastIndex(full, "/")+1:]] = true
	}
	for _, method := range runtimev1.Runtime_ServiceDesc.Methods {
		known["method"][method.MethodName] = true
	}
	queries := readFile(t, "deploy/monitoring/alerts.yaml") + strings.ReplaceAll(readFile(t, "deploy/monitoring/dashboard.json"), `\"`, `"`)
	form := regexp.MustCompile(`\b(` + strings.Join(slices.Sorted(maps.Keys(known)), "|") + `)(?:=~|!~|!=|=)"([^"]*)"`)
	count := 0
	for _, found := range form.FindAllStringSubmatch(queries, -1) {
		for value := range strings.SplitSeq(found[2], "|") {
			count++
			check.That(t, known[found[1]][value], "%s: the label %s never has the value %q", found[0], found[1], value)
		}
	}
	check.That(t, count >= 15, "only %d values were found", count)
}
