package prometheus

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

const root = "../.."

var promQL = parser.NewParser(parser.Options{})

// metric is a row of the table in docs/operations.md, which a test of internal/telemetry
// compares with the daemon's registry.
type metric struct {
	name   string
	labels []string
}

// ofTheProcess are metrics that every Go program has, as far as they are used.
var ofTheProcess = []string{
	"go_goroutines", "process_cpu_seconds_total", "process_max_fds", "process_open_fds",
	"process_resident_memory_bytes", "process_start_time_seconds",
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func dashboard(t *testing.T) board {
	t.Helper()
	var out board
	if err := json.Unmarshal([]byte(read(t, "deploy/monitoring/dashboard.json")), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// metrics gives every series' name that a scrape of the daemon has. The name of a
// histogram, and of nothing else, ends in _duration_seconds.
func metrics(t *testing.T) map[string]metric {
	t.Helper()
	out := map[string]metric{"up": {name: "up"}, "kube_node_info": {name: "kube_node_info"}} // of Prometheus and kube-state-metrics
	for _, name := range ofTheProcess {
		out[name] = metric{name: name}
	}
	row := regexp.MustCompile("(?m)^\\| `((?:crust_proxy_|volumes_)\\w+)` \\| ([^|]*)\\|")
	for _, found := range row.FindAllStringSubmatch(read(t, "docs/operations.md"), -1) {
		m := metric{name: found[1], labels: strings.Split(strings.TrimSpace(found[2]), ", ")}
		if !strings.HasSuffix(m.name, "_duration_seconds") {
			out[m.name] = m
			continue
		}
		out[m.name+"_sum"], out[m.name+"_count"] = m, m
		m.labels = append(slices.Clone(m.labels), "le")
		out[m.name+"_bucket"] = m
	}
	if len(out) < 30 {
		t.Fatalf("only %d metrics", len(out))
	}
	return out
}

// alertRules are the alert rules, as Prometheus reads them.
func alertRules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(filepath.Join(root, "deploy/monitoring/alerts.yaml"), false, model.UTF8Validation, promQL, promslog.NewNopLogger())
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var out []rulefmt.Rule
	for _, group := range groups.Groups {
		out = append(out, group.Rules...)
	}
	return out
}

// board is what is read of the dashboard.
type board struct {
	Panels     []panel
	Templating struct {
		List []struct{ Name, Definition string }
	}
}

type panel struct {
	ID      int
	Title   string
	GridPos struct{ X, W int }
	Targets []struct{ Expr, LegendFormat string }
}
