package prometheus

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

const dir = "../../deploy/monitoring"

var promQL = parser.NewParser(parser.Options{})

// metric is one of metrics.json, which is made from the daemon's registry.
type metric struct {
	Name, Type string
	Labels     []string
	Values     map[string][]string
}

func decode(t *testing.T, name string, into any) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// metrics gives every series' name that a scrape of the daemon has.
func metrics(t *testing.T) map[string]metric {
	t.Helper()
	var listed []metric
	decode(t, "metrics.json", &listed)
	out := map[string]metric{"up": {Name: "up", Type: "gauge"}} // Prometheus' own
	for _, m := range listed {
		if m.Type != "histogram" {
			out[m.Name] = m
			continue
		}
		out[m.Name+"_sum"], out[m.Name+"_count"] = m, m
		m.Labels = append(slices.Clone(m.Labels), "le")
		out[m.Name+"_bucket"] = m
	}
	if len(out) < 10 {
		t.Fatalf("only %d metrics", len(out))
	}
	return out
}

// alertRules are the alert rules, as Prometheus reads them.
func alertRules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(filepath.Join(dir, "alerts.yaml"), false, model.UTF8Validation, promQL, promslog.NewNopLogger())
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var out []rulefmt.Rule
	for _, group := range groups.Groups {
		out = append(out, group.Rules...)
	}
	return out
}

// panel is what is read of the dashboard.
type panel struct {
	Title   string
	Targets []struct{ Expr, LegendFormat string }
	Panels  []panel
}
