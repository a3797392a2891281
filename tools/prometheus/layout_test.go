package prometheus

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// node names the node in a summary. Where a scrape adds the node's name as the label
// "node", that is shown.
const node = `{{ with $labels.node }}{{ . }}{{ else }}{{ $labels.instance }}{{ end }}`

func TestAlertsAreComplete(t *testing.T) {
	name := regexp.MustCompile(`^CrustProxy[A-Z][A-Za-z]+$`)
	seen := make(map[string]bool)
	for _, a := range alertRules(t) {
		if !name.MatchString(a.Alert) || seen[a.Alert] {
			t.Errorf("%s: a bad name, or one that is there twice", a.Alert)
		}
		seen[a.Alert] = true
		if severity := a.Labels["severity"]; severity != "critical" && severity != "warning" {
			t.Errorf("%s has the severity %q", a.Alert, severity)
		}
		summary, description := a.Annotations["summary"], a.Annotations["description"]
		if !strings.HasSuffix(summary, ".") || !strings.HasSuffix(description, ".") || !strings.Contains(summary, node) {
			t.Errorf("%s: a summary names the node and is a sentence; so is a description", a.Alert)
		}
	}
}

// TestEveryAlertHasARunbook, and every runbook an alert.
func TestEveryAlertHasARunbook(t *testing.T) {
	var headings []string
	for _, found := range regexp.MustCompile(`(?m)^## (CrustProxy\w+)$`).FindAllStringSubmatch(read(t, "docs/runbooks.md"), -1) {
		headings = append(headings, found[1])
	}
	var names []string
	for _, a := range alertRules(t) {
		names = append(names, a.Alert)
		const runbooks = "https://github.com/crust-proxy/crust-proxy/blob/main/docs/runbooks.md"
		if found, want := a.Annotations["runbook_url"], runbooks+"#"+strings.ToLower(a.Alert); found != want {
			t.Errorf("the runbook of %s is %s, not %s", a.Alert, found, want)
		}
	}
	if !slices.Equal(headings, names) {
		t.Errorf("docs/runbooks.md has\n%v\nbut the alerts are\n%v", headings, names)
	}
}

func TestPanelsFillTheirRows(t *testing.T) {
	const width = 24 // of Grafana's grid
	ids := make(map[int]bool)
	for _, p := range dashboard(t).Panels {
		if ids[p.ID] || p.GridPos.X+p.GridPos.W > width {
			t.Errorf("the panel %q: number %d, place %+v", p.Title, p.ID, p.GridPos)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			if !strings.Contains(target.Expr, `instance=~"$instance"`) {
				t.Errorf("the panel %q does not go by the chosen nodes: %s", p.Title, target.Expr)
			}
		}
	}
}
