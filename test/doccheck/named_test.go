package doccheck

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestNamedTestsExist: pages name the test that shows what they promise.
func TestNamedTestsExist(t *testing.T) {
	there := testFunctions(t)
	count := 0
	for _, p := range pages(t) {
		for _, found := range regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*)`").FindAllStringSubmatch(p.text, -1) {
			count++
			check.That(t, there[found[1]], "%s names %s, which is not there", p.path, found[1])
		}
	}
	check.That(t, count >= 20, "only %d tests are named", count)
}

func testFunctions(t *testing.T) map[string]bool {
	t.Helper()
	form := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	there := make(map[string]bool)
	check.Must(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		raw, err := os.ReadFile(path)
		for _, found := range form.FindAllSubmatch(raw, -1) {
			there[string(found[1])] = true
		}
		return err
	}))
	return there
}

// TestNamedPlacesExist: directories and files of this repository, and targets of make.
func TestNamedPlacesExist(t *testing.T) {
	place := regexp.MustCompile("`((?:cmd|deploy|hack|internal|packaging|pkg|proto|systemd|test|tools)/[\\w./-]+)`")
	target := regexp.MustCompile("`make ([a-z-]+)`")
	makefile := check.Value(os.ReadFile(filepath.Join(root, "Makefile")))(t)
	for _, p := range pages(t) {
		for _, found := range place.FindAllStringSubmatch(p.text, -1) {
			_, err := os.Stat(filepath.Join(root, strings.TrimSuffix(found[1], "/...")))
			check.That(t, err == nil, "%s names %s, which is not there", p.path, found[1])
		}
		for _, found := range target.FindAllStringSubmatch(p.text, -1) {
			check.That(t, strings.Contains(string(makefile), "\n"+found[1]+":"), "%s names make %s, which is not there", p.path, found[1])
		}
	}
}

// TestNamedMetricsExist, on all pages. The table in docs/operations.md is compared with
// the daemon's metrics by a test of internal/ground/telemetry.
func TestNamedMetricsExist(t *testing.T) {
	known := make(map[string]bool)
	for _, found := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|").FindAllStringSubmatch(read(t, "docs/operations.md").text, -1) {
		known[found[1]] = true
	}
	for _, p := range pages(t) {
		for _, name := range regexp.MustCompile(`\bcrust_proxy_[a-z0-9_]+`).FindAllString(p.text, -1) {
			check.That(t, known[name], "%s names the metric %s, which is not there", p.path, name)
		}
	}
}

// configMark begins blocks of YAML that are a configuration.
const configMark = "# /etc/crust-proxy/config.yaml"

// TestConfigurationsOfPagesAreGood: whoever copies one shall have a daemon that starts.
func TestConfigurationsOfPagesAreGood(t *testing.T) {
	count := 0
	for _, p := range pages(t) {
		for _, b := range p.code {
			if b.language != "yaml" || !strings.HasPrefix(strings.TrimSpace(b.text), configMark) {
				continue
			}
			count++
			cfg, err := config.Parse([]byte(b.text))
			if err == nil {
				err = cfg.Validate()
			}
			check.That(t, err == nil, "%s: %v\n%s", p.path, err, b.text)
		}
	}
	check.That(t, count >= 3, "only %d configurations were found", count)
}

// TestRollOutNamesEachAlert: the roll-out says what to do at each alert that has a runbook.
func TestRollOutNamesEachAlert(t *testing.T) {
	roll := read(t, "docs/kubernetes.md").text
	for line := range strings.Lines(read(t, "docs/runbooks.md").text) {
		alert, is := strings.CutPrefix(line, "## CrustProxy")
		check.That(t, !is || strings.Contains(roll, "["+strings.TrimSpace(alert)+"](runbooks.md#crustproxy"),
			"docs/kubernetes.md does not say what to do at %s", alert)
	}
}
