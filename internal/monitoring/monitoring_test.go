package monitoring

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

const root = "../.."

func TestFilesAreUpToDate(t *testing.T) {
	files, err := Files()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		for _, dir := range DirsOf(name) {
			got, err := os.ReadFile(filepath.Join(root, dir, name))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s/%s is not what the code makes (%v): run make generate", dir, name, err)
			}
		}
	}
	there, err := os.ReadDir(filepath.Join(root, "deploy/monitoring"))
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range there {
		if _, made := files[entry.Name()]; !made {
			t.Errorf("deploy/monitoring/%s is not made from code", entry.Name())
		}
	}
}

func TestAMetricThatIsNotThereIsFound(t *testing.T) {
	metrics, err := Catalog()
	if err != nil {
		t.Fatal(err)
	}
	less := slices.DeleteFunc(slices.Clone(metrics), func(m Metric) bool {
		return m.Name == "crust_proxy_volumes" || m.Name == "crust_proxy_call_duration_seconds"
	})
	err = check(less, theDashboard())
	for _, want := range []string{
		"the alert CrustProxyVolumesDegraded asks for crust_proxy_volumes,", `the panel "Usage, p99" asks for crust_proxy_call_duration_seconds_bucket,`,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not said: %v", want, err)
		}
	}
	board := theDashboard()
	board.Templating.List[1].Definition = "label_values(crust_proxy_built, instance)"
	if err := check(metrics, board); err == nil || !strings.Contains(err.Error(), "the variable instance asks for crust_proxy_built,") {
		t.Errorf("got %v", err)
	}
}

// TestAMetricThatIsNeverUsedIsFound: of one without a value the registry shows
// nothing, and the catalog would be incomplete.
func TestAMetricThatIsNeverUsedIsFound(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewCounterVec(prometheus.CounterOpts{Name: "crust_proxy_new_total", Help: "New."}, []string{"x"}))
	if err := allUsed(registry, nil); err == nil || !strings.Contains(err.Error(), "crust_proxy_new_total") {
		t.Errorf("got %v", err)
	}
}

func TestAlertsAreComplete(t *testing.T) {
	name := regexp.MustCompile(`^CrustProxy[A-Z][A-Za-z]+$`)
	seen := make(map[string]bool)
	for _, a := range Alerts() {
		if !name.MatchString(a.Name) || seen[a.Name] {
			t.Errorf("%s: a bad name, or one that is there twice", a.Name)
		}
		seen[a.Name] = true
		if a.Severity != critical && a.Severity != warning {
			t.Errorf("%s has the severity %q", a.Name, a.Severity)
		}
		if !strings.HasSuffix(a.Summary, ".") || !strings.HasSuffix(a.Description, ".") || !strings.Contains(a.Summary, on) {
			t.Errorf("%s: a summary names the node and is a sentence; so is a description", a.Name)
		}
	}
}

// TestEveryAlertHasARunbook, and every runbook an alert.
func TestEveryAlertHasARunbook(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(root, "docs/runbooks.md"))
	if err != nil {
		t.Fatal(err)
	}
	var headings []string
	for _, found := range regexp.MustCompile(`(?m)^## (CrustProxy\w+)$`).FindAllSubmatch(raw, -1) {
		headings = append(headings, string(found[1]))
	}
	var names []string
	for _, a := range Alerts() {
		names = append(names, a.Name)
		if want := "/docs/runbooks.md#" + strings.ToLower(a.Name); !strings.HasSuffix(a.Runbook(), want) {
			t.Errorf("the runbook of %s is %s", a.Name, a.Runbook())
		}
	}
	if !slices.Equal(headings, names) {
		t.Errorf("docs/runbooks.md has\n%v\nbut the alerts are\n%v", headings, names)
	}
}

// TestOperationsListsEveryMetric of ours, with its labels.
func TestOperationsListsEveryMetric(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(root, "docs/operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := make(map[string]string)
	for _, found := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([^|]*)\\|").FindAllSubmatch(raw, -1) {
		rows[string(found[1])] = strings.TrimSpace(string(found[2]))
	}
	metrics, err := Catalog()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range metrics {
		if !isOurs(m.Name) {
			continue
		}
		listed, there := rows[m.Name]
		labels := strings.Split(listed, ", ")
		slices.Sort(labels)
		if !there || strings.Join(labels, ", ") != strings.Join(m.Labels, ", ") {
			t.Errorf("docs/operations.md does not list %s with the labels %q (but %q)", m.Name, m.Labels, listed)
		}
		delete(rows, m.Name)
	}
	for name := range rows {
		if strings.HasPrefix(name, "crust_proxy_") || strings.HasPrefix(name, "volumes_published_") {
			t.Errorf("docs/operations.md lists %s, which the daemon does not have", name)
		}
	}
}

func TestPanelsFillTheirRows(t *testing.T) {
	ids := make(map[int]bool)
	for _, p := range theDashboard().Panels {
		if ids[p.ID] || p.GridPos.X+p.GridPos.W > grid {
			t.Errorf("the panel %q: number %d, place %+v", p.Title, p.ID, p.GridPos)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			if strings.Contains(target.Expr, "SEL") || !strings.Contains(target.Expr, sel) {
				t.Errorf("the panel %q does not go by the chosen nodes: %s", p.Title, target.Expr)
			}
		}
	}
}
