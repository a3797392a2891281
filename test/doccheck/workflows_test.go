package doccheck

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestWorkflows: actions are pinned by a commit, with their version, and make has the targets.
func TestWorkflows(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, ".github/workflows/*.yml"))
	check.Require(t, err == nil && len(files) != 0, "workflows: %v, %v", files, err)
	makefile := check.Value(os.ReadFile(filepath.Join(root, "Makefile")))(t)
	pinned := regexp.MustCompile(`^[\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)
	for _, file := range files {
		raw := check.Value(os.ReadFile(file))(t)
		for line := range strings.Lines(string(raw)) {
			_, action, found := strings.Cut(strings.TrimSpace(line), "uses: ")
			check.That(t, !found || pinned.MatchString(action), "%s: %s is not pinned by a commit", file, action)
			for _, target := range regexp.MustCompile(`\bmake ([a-z-]+)`).FindAllStringSubmatch(line, -1) {
				check.That(t, strings.Contains(string(makefile), "\n"+target[1]+":"), "%s: make has no target %s", file, target[1])
			}
		}
	}
}
