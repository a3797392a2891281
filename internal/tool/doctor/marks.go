package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
)

// manyMarks is how many marks are counted: a node that has more keeps those of volumes that no
// longer exist.
const manyMarks = 100_000

// rulesByPod names the rules that defer the volumes of some pods only.
func rulesByPod(c config.Config) []string {
	var names []string
	for _, rule := range c.Policy.Rules {
		if rule.Defer && len(rule.RuntimeHandlers) > 0 {
			names = append(names, fmt.Sprintf("%q", rule.Name))
		}
	}
	return names
}

// checkMarks counts the volumes that the host does not mount after a sandbox. Rules that depend
// on the pod are no error, but are always named, because another node does not have the mark.
func checkMarks(_ context.Context, n Node, _ Daemon) []Finding {
	if n.MarksDir == "" {
		return []Finding{okay("the front is off, so there are no marks")}
	}
	names, err := namesIn(n.at(n.MarksDir), manyMarks)
	if err != nil {
		return []Finding{failure(n.Service.Restart()+", which creates the directory, or repair it",
			"the marks in %s cannot be read, so no volume that a rule could defer is mounted on the host: %v", n.MarksDir, err)}
	}
	if len(names) == manyMarks {
		return []Finding{warning("remove the files of volumes that no longer exist", "%s has %d marks or more", n.MarksDir, manyMarks)}
	}
	seen := fmt.Sprintf("%d volumes were read-write in a sandbox of this node and are not mounted on the host", len(names))
	if len(n.RulesByPod) > 0 {
		seen += "; other nodes do not know that, and the rules " + strings.Join(n.RulesByPod, ", ") + " depend on the pod"
	}
	return []Finding{okay("%s", seen)}
}

func namesIn(dir string, most int) ([]string, error) {
	file, err := os.Open(dir) //nolint:gosec // the daemon's own directory
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	names, err := file.Readdirnames(most)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}
