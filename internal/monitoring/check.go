package monitoring

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// metricName finds in PromQL what can only be a metric of ours. The whole of the
// language is parsed by tools/prometheus, which knows labels too.
var metricName = regexp.MustCompile(`\b(crust_proxy_|volumes_published_|process_|go_)[a-z0-9_]+`)

// check fails for each metric that is asked for and that the daemon does not have.
func check(metrics []Metric, board dashboard) error {
	known := make(map[string]bool)
	for _, m := range metrics {
		known[m.Name] = true
		if m.Type == "histogram" {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				known[m.Name+suffix] = true
			}
		}
	}
	var found []error
	ask := func(who, expr string) {
		for _, name := range metricName.FindAllString(expr, -1) {
			if !known[name] {
				found = append(found, fmt.Errorf("%s asks for %s, which the daemon does not have", who, name))
			}
		}
	}
	for _, a := range Alerts() {
		ask("the alert "+a.Name, a.Expr)
	}
	for _, p := range board.Panels {
		for _, t := range p.Targets {
			ask(fmt.Sprintf("the panel %q", p.Title), t.Expr)
		}
	}
	for _, v := range board.Templating.List {
		ask("the variable "+v.Name, strings.TrimSpace(v.Definition))
	}
	return errors.Join(found...)
}
