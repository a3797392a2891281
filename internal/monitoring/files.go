package monitoring

import (
	"encoding/json"
	"fmt"

	"sigs.k8s.io/yaml"
)

// The names of the files in deploy/monitoring.
const (
	fileAlerts    = "alerts.yaml"
	fileRule      = "prometheusrule.yaml"
	fileDashboard = "dashboard.json"
	fileMetrics   = "metrics.json"
)

// DirsOf tells in which directories a file stands: a chart can read only what is
// in it.
func DirsOf(name string) []string {
	dirs := []string{"deploy/monitoring"}
	if name == fileAlerts || name == fileDashboard {
		dirs = append(dirs, "deploy/helm/crust-proxy/files")
	}
	return dirs
}

const header = "# Made by internal/monitoring: change it there, and run make generate.\n"

type ruleFile struct {
	Groups []ruleGroup `json:"groups"`
}

type ruleGroup struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type rule struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// prometheusRule is the custom resource of the Prometheus operator.
type prometheusRule struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Metadata   metadata `json:"metadata"`
	Spec       ruleFile `json:"spec"`
}

type metadata struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels"`
}

// Files gives the content of each file, by its name. It fails where an alert or a
// panel asks for a metric that the daemon does not have.
func Files() (map[string][]byte, error) {
	metrics, err := Catalog()
	if err != nil {
		return nil, err
	}
	board := theDashboard()
	if err := check(metrics, board); err != nil {
		return nil, err
	}
	rules := ruleFile{Groups: []ruleGroup{{Name: "crust-proxy", Rules: rulesOf(Alerts())}}}
	out := make(map[string][]byte)
	for name, content := range map[string]any{
		fileAlerts: rules,
		fileRule: prometheusRule{
			APIVersion: "monitoring.coreos.com/v1", Kind: "PrometheusRule",
			Metadata: metadata{Name: "crust-proxy", Labels: map[string]string{"app.kubernetes.io/name": "crust-proxy"}}, Spec: rules,
		},
	} {
		raw, err := yaml.Marshal(content)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", name, err)
		}
		out[name] = append([]byte(header), raw...)
	}
	for name, content := range map[string]any{fileDashboard: board, fileMetrics: metrics} {
		raw, err := json.MarshalIndent(content, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", name, err)
		}
		out[name] = append(raw, '\n')
	}
	return out, nil
}

func rulesOf(alerts []Alert) []rule {
	out := make([]rule, 0, len(alerts))
	for _, a := range alerts {
		out = append(out, rule{
			Alert: a.Name, Expr: a.Expr, For: a.For, Labels: map[string]string{"severity": a.Severity},
			Annotations: map[string]string{"summary": a.Summary, "description": a.Description, "runbook_url": a.Runbook()},
		})
	}
	return out
}
