package prometheus

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"
)

// ofTarget are the labels that Prometheus, or a monitor's relabelling, adds.
var ofTarget = []string{"job", "instance", "node", "namespace", "pod", "container"}

// check parses an expression and gives the labels that its result can have. It
// fails for a metric or a label that the daemon does not have.
func check(expr string, known map[string]metric) (map[string]bool, error) {
	parsed, err := promQL.ParseExpr(expr)
	if err != nil {
		return nil, err
	}
	return labelsOf(parsed, known)
}

func labelsOf(node parser.Node, known map[string]metric) (map[string]bool, error) {
	switch n := node.(type) {
	case *parser.VectorSelector:
		return ofSelector(n, known)
	case *parser.AggregateExpr:
		return ofAggregate(n, known)
	case *parser.BinaryExpr:
		left, err := labelsOf(n.LHS, known)
		if err != nil {
			return nil, err
		}
		right, err := labelsOf(n.RHS, known)
		if _, number := n.LHS.(*parser.NumberLiteral); number {
			left = right
		}
		return left, err
	case *parser.Call:
		return ofCall(n, known)
	}
	out := make(map[string]bool)
	for child := range parser.ChildrenIter(node) {
		found, err := labelsOf(child, known)
		if err != nil {
			return nil, err
		}
		maps.Copy(out, found)
	}
	return out, nil
}

func ofSelector(n *parser.VectorSelector, known map[string]metric) (map[string]bool, error) {
	m, there := known[n.Name]
	if !there {
		return nil, fmt.Errorf("there is no metric %q", n.Name)
	}
	out := make(map[string]bool)
	for _, label := range append(slices.Clone(ofTarget), m.labels...) {
		out[label] = true
	}
	for _, matcher := range n.LabelMatchers {
		if matcher.Name == model.MetricNameLabel {
			continue
		}
		if !out[matcher.Name] {
			return nil, fmt.Errorf("%s has no label %q", n.Name, matcher.Name)
		}
	}
	return out, nil
}

func ofAggregate(n *parser.AggregateExpr, known map[string]metric) (map[string]bool, error) {
	inner, err := labelsOf(n.Expr, known)
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool)
	if n.Without {
		maps.Copy(out, inner)
	}
	for _, label := range n.Grouping {
		if !inner[label] {
			return nil, fmt.Errorf("%s: there is no label %q to group by", n, label)
		}
		out[label] = !n.Without
	}
	return out, nil
}

func ofCall(n *parser.Call, known map[string]metric) (map[string]bool, error) {
	out := make(map[string]bool)
	for _, arg := range n.Args {
		found, err := labelsOf(arg, known)
		if err != nil {
			return nil, err
		}
		maps.Copy(out, found)
	}
	if n.Func.Name == "histogram_quantile" {
		if !out["le"] {
			return nil, fmt.Errorf("%s: without le there is no quantile", n)
		}
		delete(out, "le")
	}
	return out, nil
}

func TestWhatIsNotThereIsFound(t *testing.T) {
	known := metrics(t)
	for expr, want := range map[string]string{
		`crust_proxy_volume > 0`:                                      `no metric "crust_proxy_volume"`,
		`crust_proxy_call_duration_seconds > 0`:                       "no metric",
		`crust_proxy_volumes{stat="bound"}`:                           `no label "stat"`,
		`sum by (sandbox) (crust_proxy_volumes)`:                      `no label "sandbox" to group by`,
		`sum by (driver) (sum by (state) (crust_proxy_volumes))`:      `no label "driver" to group by`,
		`histogram_quantile(0.9, crust_proxy_build_info)`:             "without le",
		`rate(crust_proxy_calls_total[5m]) / on(x) up{pod="a",b="c"}`: `no label "b"`,
		`sum(`: "parse error",
	} {
		if _, err := check(expr, known); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", expr, err, want)
		}
	}
}

// used finds the labels that a template of Prometheus asks for.
var used = regexp.MustCompile(`\$labels\.(\w+)`)

func TestAlertsAskForWhatIsThere(t *testing.T) {
	known := metrics(t)
	for _, rule := range alertRules(t) {
		has, err := check(rule.Expr, known)
		if err != nil {
			t.Errorf("%s: %v", rule.Alert, err)
			continue
		}
		for name, text := range rule.Annotations {
			for _, found := range used.FindAllStringSubmatch(text, -1) {
				if !has[found[1]] {
					t.Errorf("%s: its %s shows the label %s, which %s does not give", rule.Alert, name, found[1], rule.Expr)
				}
			}
		}
	}
}

// inLegend finds the labels that a legend of Grafana asks for.
var inLegend = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)

func TestPanelsAskForWhatIsThere(t *testing.T) {
	board := dashboard(t)
	known, count := metrics(t), 0
	variables := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*")
	for _, panel := range board.Panels {
		for _, target := range panel.Targets {
			count++
			has, err := check(variables.Replace(target.Expr), known)
			if err != nil {
				t.Errorf("%s: %v", panel.Title, err)
			}
			for _, found := range inLegend.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !has[found[1]] {
					t.Errorf("%s: its legend shows %s, which %s does not give", panel.Title, found[1], target.Expr)
				}
			}
		}
	}
	if count < 20 {
		t.Errorf("only %d queries were found", count)
	}
	form := regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`)
	for _, variable := range board.Templating.List {
		if variable.Definition == "" {
			continue
		}
		found := form.FindStringSubmatch(variable.Definition)
		if found == nil {
			t.Errorf("the variable %s is %s", variable.Name, variable.Definition)
			continue
		}
		if has, err := check(found[1], known); err != nil || !has[found[2]] {
			t.Errorf("the variable %s: %v, or no label %s", variable.Name, err, found[2])
		}
	}
}
