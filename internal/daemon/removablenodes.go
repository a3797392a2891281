package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

const (
	// askedAtOnce bounds the nodes that are asked at a time, and askTime the time of each.
	askedAtOnce = 32
	askTime     = 15 * time.Second
	mostMetrics = 16 << 20
)

// removableNodes resolves a host name to the addresses of all daemons, and reads from their metrics whether they have
// deferred volumes, or drivers behind the front, before crust-proxy is removed from a cluster. A daemon that does not
// answer counts as having some. The command reads no objects of the cluster, so it cannot know of a node whose pod has
// no address, and says so. The second argument is the command that restores a Helm release that a refusal left half
// uninstalled, and the third the release's own driver, which goes with it.
func removableNodes(ctx context.Context, call invocation) error {
	args := slices.Concat(call.args, []string{"", ""})
	address, repair, own := args[0], args[1], args[2]
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q is not host:port: %w", address, err)
	}
	nodes, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return fmt.Errorf("no node can be asked whether deferred volumes live there: %w. If no pod of crust-proxy ever ran, none do: helm uninstall --no-hooks%s", err, afterRefusal(repair))
	}
	if err := askNodes(ctx, nodes, port, own); err != nil {
		return fmt.Errorf("%w\nDelete the pods of the volumes, or drain the nodes, move the drivers back (docs/kubernetes.md, Removal), and try again; "+
			"on a node, crustctl list and crust-proxy removable name the volumes.%s%s",
			err, whatItIs, afterRefusal(repair))
	}
	_, err = fmt.Fprintf(call.stdout, "No deferred volume lives on any of %d nodes, and no driver is behind the front there. A node whose crust-proxy pod is missing or has no address was not asked.\n", len(nodes))
	return err
}

func afterRefusal(repair string) string {
	if repair == "" {
		return ""
	}
	return "\nNothing was removed, but Helm now calls the release uninstalling: helm list hides it, and helm upgrade fails. " +
		"To go on with the release:\n  " + repair + "\nTo remove it, run helm uninstall again when they are gone."
}

// askNodes asks all nodes. Its error has a line for each node with volumes, and for each that did not answer.
func askNodes(ctx context.Context, nodes []string, port, own string) error {
	slices.Sort(nodes)
	problems := make([]error, len(nodes))
	sys.Each(askedAtOnce, slices.All(nodes), func(i int, node string) {
		if problems[i] = askNode(ctx, net.JoinHostPort(node, port), own); problems[i] != nil {
			problems[i] = fmt.Errorf("node %s: %w", node, problems[i])
		}
	})
	return errors.Join(problems...)
}

func askNode(ctx context.Context, address, own string) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return err
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("its crust-proxy cannot be asked: %w", err)
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		return fmt.Errorf("its crust-proxy cannot be asked: the answer is %s", reply.Status)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(io.LimitReader(reply.Body, mostMetrics))
	samples, extractErr := expfmt.ExtractSamples(&expfmt.DecodeOptions{}, slices.Collect(maps.Values(families))...)
	if err = errors.Join(err, extractErr); err != nil {
		return fmt.Errorf("its answer cannot be read: %w", err)
	}
	if families["crust_proxy_build_info"] == nil {
		return errors.New("what answers there is no crust-proxy")
	}
	return livesThere(samples, own)
}

// notLiving holds the states of volumes that a removal does not abandon: those of other
// programs, and those that were never deferred.
var notLiving = []model.LabelValue{"adopted", "refused"}

func livesThere(samples model.Vector, own string) error {
	count, unusable, of, behind := 0, 0, []string{}, []string{}
	for _, one := range samples {
		driver := string(one.Metric["driver"])
		switch one.Metric[model.MetricNameLabel] {
		case "crust_proxy_driver_ready":
			if driver != own && driver != "unknown" { // of a registrar that does not answer
				behind = append(behind, driver)
			}
		case "crust_proxy_records_unusable": // each may be of a volume, or of a device that is held
			unusable += int(one.Value)
		case "crust_proxy_volumes", "crust_proxy_devices_staged":
			if one.Value > 0 && !slices.Contains(notLiving, one.Metric["state"]) {
				count += int(one.Value)
				of = append(of, driver)
			}
		}
	}
	var found []string
	if slices.Sort(of); count > 0 {
		found = append(found, fmt.Sprintf("%d deferred volume(s) live there, of %s", count, strings.Join(slices.Compact(of), ", ")))
	}
	if unusable > 0 {
		found = append(found, fmt.Sprintf("%d record(s) there cannot be used, and may be of volumes: crustctl doctor names them", unusable))
	}
	if slices.Sort(behind); len(behind) > 0 {
		found = append(found, fmt.Sprintf("%d CSI driver(s) are behind the front there: %s", len(behind), strings.Join(behind, ", ")))
	}
	if found == nil {
		return nil
	}
	return errors.New(strings.Join(found, "; "))
}
