// Chartreadme prints the README of the chart in a directory: what it is, and a table of its values
// with the comments that values.yaml has on them.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v4"
)

const head = `# crust-proxy

%s.

    helm install crust-proxy crust-proxy-VERSION.tgz -n crust-proxy --create-namespace --set image.repository=REGISTRY/crust-proxy
    helm test crust-proxy -n crust-proxy

[How to choose](https://github.com/crust-proxy/crust-proxy/blob/main/docs/kubernetes.md). A schema refuses unknown
values. The file crust-proxy-VERSION-images.tar of the release has the images, for a registry of your own.

| value | default | |
| --- | --- | --- |
`

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "chartreadme:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	var chart struct {
		Description string `yaml:"description"`
	}
	raw, err := os.ReadFile(filepath.Join(dir, "Chart.yaml")) //nolint:gosec // of the checkout
	if err != nil {
		return err
	}
	if err := yaml.Unmarshal(raw, &chart); err != nil {
		return err
	}
	raw, err = os.ReadFile(filepath.Join(dir, "values.yaml")) //nolint:gosec // of the checkout
	if err != nil {
		return err
	}
	rows, err := table(raw)
	if err != nil {
		return err
	}
	_, err = fmt.Printf(head+"%s", chart.Description, strings.Join(rows, ""))
	return err
}

// table has a row for each value, and one for each map whose comment explains those in it.
func table(values []byte) ([]string, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(values, &document); err != nil {
		return nil, err
	}
	return rowsOf("", document.Content[0])
}

func rowsOf(prefix string, values *yaml.Node) (rows []string, err error) {
	for i := 0; i+1 < len(values.Content); i += 2 {
		key, value := values.Content[i], values.Content[i+1]
		name, comment := prefix+key.Value, text(key.HeadComment)
		if value.Kind == yaml.MappingNode && len(value.Content) > 0 {
			if comment != "" {
				rows = append(rows, row(name, "", comment))
			}
			inner, err := rowsOf(name+".", value)
			if err != nil {
				return nil, err
			}
			rows = append(rows, inner...)
			continue
		}
		shown, err := inline(value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		rows = append(rows, row(name, shown, comment))
	}
	return rows, nil
}

func row(name, value, comment string) string {
	if value != "" {
		value = "`" + value + "`"
	}
	return fmt.Sprintf("| `%s` | %s | %s |\n", name, value, comment)
}

// inline is a value as it can be given to helm's --set-json, or what it is a list of.
func inline(value *yaml.Node) (string, error) {
	if value.Kind == yaml.SequenceNode && len(value.Content) > 0 && value.Content[0].Kind == yaml.MappingNode {
		return fmt.Sprintf("%d items, see values.yaml", len(value.Content)), nil
	}
	clean := *value
	clean.HeadComment, clean.LineComment, clean.FootComment = "", "", ""
	clean.Style = yaml.FlowStyle
	out, err := yaml.Marshal(&clean)
	return strings.TrimSpace(string(out)), err
}

// text is the last paragraph of a comment, without its marks: those before it head a part of the file.
func text(comment string) string {
	paragraphs := strings.Split(comment, "\n\n")
	lines := strings.Split(paragraphs[len(paragraphs)-1], "\n")
	for i, line := range lines {
		lines[i] = strings.ReplaceAll(strings.TrimSpace(strings.TrimPrefix(line, "#")), "|", "\\|")
	}
	return strings.Join(lines, " ")
}
