package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sync/errgroup"
)

const (
	// askedAtOnce bounds the nodes that are asked at a time, and askTime the time of each.
	askedAtOnce = 32
	askTime     = 15 * time.Second
	mostMetrics = 16 << 20
)

// removableNodes resolves a host name to the addresses of all daemons, and reads from their
// metrics whether they have deferred volumes, before crust-proxy is removed from a cluster. A
// daemon that does not answer counts as having some. The command reads no objects of the
// cluster, so it cannot know of a node whose pod has no address, and says so. The second argument is
// the command that restores a Helm release that a refusal left half uninstalled.
func removableNodes(ctx context.Context, call invocation) error {
	address, repair := call.args[0], call.args[1:]
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%q is not host:port: %w", address, err)
	}
	nodes, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return fmt.Errorf("no node can be asked whether deferred volumes live there: %w%s", err, afterRefusal(repair))
	}
	if err := askNodes(ctx, nodes, port); err != nil {
		return fmt.Errorf("%w\nDelete their pods, or drain the nodes, and try again; on a node, crustctl list and crust-proxy removable name the volumes.%s%s",
			err, whatItIs, afterRefusal(repair))
	}
	_, err = fmt.Fprintf(call.stdout, "No deferred volume lives on any of %d nodes. A node whose crust-proxy pod is missing or has no address was not asked.\n", len(nodes))
	return err
}

func afterRefusal(repair []string) string {
	if len(repair) == 0 {
		return ""
	}
	return "\nNothing was removed, but Helm now calls the release uninstalling: helm list hides it, and helm upgrade fails. " +
		"To go on with the release:\n  " + repair[0] + "\nTo remove it, run helm uninstall again when the volumes are gone."
}

// askNodes asks all nodes. Its error has a line for each node with volumes, and for each that
// did not answer.
func askNodes(ctx context.Context, nodes []string, port string) error {
	slices.Sort(nodes)
	problems := make([]error, len(nodes))
	var group errgroup.Group
	group.SetLimit(askedAtOnce)
	for i, node := range nodes {
		group.Go(func() error {
			if problems[i] = askNode(ctx, net.JoinHostPort(node, port)); problems[i] != nil {
				problems[i] = fmt.Errorf("node %s: %w", node, problems[i])
			}
			return nil
		})
	}
	return errors.Join(group.Wait(), errors.Join(problems...))
}

func askNode(ctx context.Context, address string) error {
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
	if err != nil {
		return fmt.Errorf("its answer cannot be read: %w", err)
	}
	if families["crust_proxy_build_info"] == nil {
		return errors.New("what answers there is no crust-proxy")
	}
	return livesThere(slices.Concat(families["crust_proxy_volumes"].GetMetric(), families["crust_proxy_devices_staged"].GetMetric()))
}

// notLiving holds the states of volumes that a removal does not abandon: those of other
// programs, and those that were never deferred.
var notLiving = []string{"adopted", "refused"}

func livesThere(volumes []*dto.Metric) error {
	count, drivers := 0, []string{}
	for _, one := range volumes {
		labels := map[string]string{}
		for _, label := range one.GetLabel() {
			labels[label.GetName()] = label.GetValue()
		}
		if n := int(one.GetGauge().GetValue()); n > 0 && !slices.Contains(notLiving, labels["state"]) {
			count += n
			drivers = append(drivers, labels["driver"])
		}
	}
	if count == 0 {
		return nil
	}
	slices.Sort(drivers)
	return fmt.Errorf("%d deferred volume(s) live there, of %s", count, strings.Join(slices.Compact(drivers), ", "))
}
