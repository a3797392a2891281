package daemon

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/internal/ground/pace"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// scrapeTime bounds what a scrape asks of the handlers.
const scrapeTime = 2 * time.Second

// nodeStatus reports what is wrong on the node: in words for doctor, in numbers for metrics.
type nodeStatus struct {
	daemon   *daemon
	mounted  *hostMounts
	staged   []staging.Staged // at the start
	badFront error            // which of the front's records could not be read at the start
}

func (n *nodeStatus) findings(ctx context.Context) []string {
	var out []string
	for _, problem := range n.daemon.broker.Problems() {
		out = append(out, problem.Error())
	}
	if kept := n.daemon.broker.KeptClaims(); n.daemon.notify.CanStore() && kept > n.daemon.notify.Room() {
		out = append(out, fmt.Sprintf("%d devices are claimed, and systemd keeps %d descriptors over a restart: the others can be taken "+
			"while crust-proxy restarts; raise FileDescriptorStoreMax= of crust-proxy.service", kept, n.daemon.notify.Room()))
	}
	if n.badFront != nil {
		out = append(out, fmt.Sprintf("%v: a device that its driver has staged for it may stay staged", n.badFront))
	}
	if n.daemon.tracker != nil && !n.daemon.tracker.Ready() {
		out = append(out, fmt.Sprintf("sandboxes cannot be followed (%v): those of runtime-rs are not found", n.daemon.tracker.LastError()))
	}
	out = append(out, polledFinding(n.daemon.tracker)...)
	out = append(out, n.clusterFindings()...)
	out = append(out, n.heldFindings()...)
	if err := n.daemon.http.Problem(); err != nil {
		out = append(out, err.Error()+": free the address, or change http.listen and restart crust-proxy; volumes are served meanwhile")
	}
	out = append(out, n.daemon.settings.findings()...)
	if n.daemon.front != nil {
		for _, problem := range n.daemon.front.drivers.Bypassed() {
			out = append(out, problem)
		}
		out = append(out, n.driversAway()...)
		if n.daemon.cluster != nil {
			out = append(out, csiNodeFindings(n.daemon.front.drivers.List(), n.daemon.cluster.State())...)
		}
	}
	return append(out, n.mounted.findings(ctx)...)
}

func (n *nodeStatus) clusterFindings() []string {
	if n.daemon.cluster == nil {
		return nil
	}
	var out []string
	for _, problem := range n.daemon.cluster.State().Problems {
		out = append(out, "pods cannot be looked up: "+problem+": volumes of pods that are not known yet are refused")
	}
	return out
}

// maxHeldFindings bounds the findings: `crustctl list` shows them all.
const maxHeldFindings = 16

func (n *nodeStatus) heldFindings() []string {
	var out []string
	if err := n.daemon.openers.Blind(); err != nil {
		_, why := n.daemon.openers.Method()
		out = append(out, fmt.Sprintf("it cannot be seen who has a device open, so that no volume can be staged or unstaged: %v; "+
			"the kernel's own count cannot be used: %v", err, why))
	}
	held := n.daemon.broker.Users().Held()
	for _, h := range held[:min(maxHeldFindings, len(held))] {
		out = append(out, fmt.Sprintf("volume %s: its device %s is to be released or claimed, or was released by force, and is still open in %s: "+
			"if that is the VM of a pod that has gone, `crustctl end` it", h.Volume.Target, h.Volume.Device.Path, h.Processes))
	}
	return out
}

// driversAway reports volumes whose driver is not behind the front any more, so that kubelet
// cannot unpublish them.
func (n *nodeStatus) driversAway() []string {
	here := make(map[string]bool)
	for _, one := range n.daemon.front.drivers.List() {
		here[one.Name] = true
	}
	away := make(map[string][]string)
	var loop pace.Loop
	for _, status := range n.daemon.broker.List() {
		loop.Step()
		if status.Origin != nil && !here[status.Driver] {
			away[status.Driver] = append(away[status.Driver], describe(status.Volume))
		}
	}
	var out []string
	for _, driver := range slices.Sorted(maps.Keys(away)) {
		out = append(out, fmt.Sprintf("driver %s is not behind crust-proxy any more, and its volumes cannot be given back until it is: %s",
			driver, living{volumes: away[driver]}.text()))
	}
	return out
}

// csiNodeFindings reports what is wrong with the node's CSINode. If pods cannot be looked up
// either, there is a finding for that already.
func csiNodeFindings(drivers []registry.State, look pods.State) []string {
	var out []string
	for _, one := range drivers {
		if one.Missing {
			out = append(out, fmt.Sprintf("driver %s is %s", one.Name, registry.NotInNode))
		}
	}
	if look.CSINode != nil && len(look.Problems) == 0 {
		out = append(out, fmt.Sprintf("it is not known which drivers are in the node's CSINode: %v: a registration that kubelet loses "+
			"is not renewed; see the rights in docs/front.md", look.CSINode))
	}
	return out
}

func (n *nodeStatus) metrics() telemetry.NodeState {
	all := n.daemon.node.All()
	state := telemetry.NodeState{
		ConfigGood: n.daemon.settings.bad.Load() == nil, BadRecords: len(n.daemon.broker.Problems()),
		Sources: make(map[string]bool), Handlers: make(map[string]bool), Drivers: make(map[string]bool), Missing: make(map[string]bool),
		Abnormal: count(all, n.isAbnormal), GroupIgnored: count(all, n.ignoresGroup), Held: len(n.daemon.broker.Users().Held()),
		Staged: n.stagedOnly(all), Volumes: count(n.daemon.node.AllShown(), n.stateOf),
	}
	state.Proof, _ = describeProof(n.daemon.openers)
	if n.daemon.tracker != nil {
		state.Sources["sandboxes"] = n.daemon.tracker.Ready()
	}
	if n.daemon.cluster != nil {
		lookups := n.daemon.cluster.State()
		maps.Copy(state.Sources, lookups.Synced)
		state.Cluster = &telemetry.ClusterState{LastHeard: lookups.LastHeard, Pods: lookups.Pods, Incomplete: lookups.Incomplete}
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTime)
	defer cancel()
	for _, handler := range n.daemon.handlers {
		state.Handlers[handler.Name()] = handler.Health(ctx) == nil
	}
	if n.daemon.front != nil {
		for _, driver := range n.daemon.front.drivers.List() {
			// A second registrar of the same name is refused and does no harm.
			state.Drivers[driver.Name] = state.Drivers[driver.Name] || driver.Ready
			state.Missing[driver.Name] = state.Missing[driver.Name] || driver.Missing
		}
	}
	return state
}

// stagedOnly counts the devices that are staged through the front without a volume on record,
// as livingOf does. Records that cannot be read count as one such device.
func (n *nodeStatus) stagedOnly(all []deferral.Status) []telemetry.VolumeCount {
	published := make(map[staging.VolumeID]bool)
	var loop pace.Loop
	for _, status := range all {
		loop.Step()
		if status.Origin != nil {
			published[staging.VolumeID{Driver: status.Driver, ID: status.Origin.VolumeID}] = true
		}
	}
	staged := n.staged
	if n.daemon.front != nil {
		staged = n.daemon.front.front.StagedDevices()
	}
	var out []telemetry.VolumeCount
	for _, one := range staged {
		if !published[staging.VolumeID{Driver: one.Driver, ID: one.VolumeID}] {
			out = append(out, telemetry.VolumeCount{Driver: one.Driver, Count: 1})
		}
	}
	if n.badFront != nil {
		out = append(out, telemetry.VolumeCount{Count: 1})
	}
	return out
}

// count counts volumes by driver, handler and the name that state returns. Volumes for which
// state returns false are left out.
func count(all []deferral.Status, state func(deferral.Status) (string, bool)) []telemetry.VolumeCount {
	counts := make(map[telemetry.VolumeCount]int)
	var loop pace.Loop
	for _, status := range all {
		loop.Step()
		if name, ok := state(status); ok {
			counts[telemetry.VolumeCount{State: name, Driver: status.Driver, Handler: status.Handler}]++
		}
	}
	out := make([]telemetry.VolumeCount, 0, len(counts))
	for labels, n := range counts {
		labels.Count = n
		out = append(out, labels)
	}
	return out
}

// isAbnormal uses the sandbox's last stats; kubelet requests them regularly.
func (n *nodeStatus) isAbnormal(status deferral.Status) (string, bool) {
	known, ok := n.daemon.relay.Known(status.Key)
	return "", ok && known.Condition != nil && known.Condition.Abnormal
}

// ignoresGroup uses the sandbox's last stats, too.
func (n *nodeStatus) ignoresGroup(status deferral.Status) (string, bool) {
	known, ok := n.daemon.relay.Known(status.Key)
	return "", ok && known.GroupIgnored
}

func (n *nodeStatus) stateOf(status deferral.Status) (string, bool) {
	return n.daemon.node.StateOf(status), true
}
