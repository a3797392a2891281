package daemon

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/systemd"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// scrapeTime bounds what a scrape asks of the handlers.
const scrapeTime = 2 * time.Second

// part is a part of the daemon that reports what is wrong with it: in words for doctor, in
// numbers for metrics. With errors, volumes cannot be served, or not safely, or as the configuration file says.
type part interface {
	findings() (errors, warnings []string)
	measure(ctx context.Context, into *telemetry.NodeState)
}

// parts are those of the daemon, in the order in which doctor shows them.
type parts []part

// findings are those of all parts. Public ones do not quote the configuration.
func (all parts) findings(public bool) (errors, warnings []string) {
	for _, one := range all {
		bad, others := one.findings()
		if _, quotes := one.(*settings); quotes && public {
			bad, others = unquoted(bad), unquoted(others)
		}
		errors, warnings = append(errors, bad...), append(warnings, others...)
	}
	return errors, warnings
}

// unquoted cuts off what follows the first colon of findings of the configuration.
func unquoted(findings []string) (out []string) {
	for _, finding := range findings {
		what, _, _ := strings.Cut(finding, ": ")
		out = append(out, what+": see crustctl doctor on the node")
	}
	return slices.Compact(out)
}

// state asks all parts for their numbers.
func (all parts) state() telemetry.NodeState {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTime)
	defer cancel()
	state := telemetry.NodeState{
		Sources: make(map[string]bool), Handlers: make(map[string]bool), Drivers: make(map[string]bool), Missing: make(map[string]bool),
	}
	for _, one := range all {
		one.measure(ctx, &state)
	}
	addSeverities(&state)
	failed, warned := all.findings(false)
	state.Errors, state.Warnings = state.Errors+len(failed), state.Warnings+len(warned)
	return state
}

// addVolume counts a volume that something is wrong with, with the severity of crustctl doctor (volumeFindings there).
func addVolume(status deferral.Status, state string, into *telemetry.NodeState) {
	switch {
	case status.Held != nil && status.Held.Forced, state == "degraded":
		into.Errors++
	case status.Held != nil, state == "refused":
		into.Warnings++
	}
}

// addSeverities counts what the other numbers say to be wrong, with the severities of crustctl doctor.
func addSeverities(state *telemetry.NodeState) {
	for _, v := range state.Abnormal {
		state.Errors += v.Count
	}
	for _, v := range state.GroupIgnored {
		state.Warnings += v.Count
	}
	for _, working := range []map[string]bool{state.Handlers, state.Drivers} {
		for name, good := range working {
			switch {
			case !good && name == "": // a registrar that has not said its driver's name
				state.Warnings++
			case !good, state.Missing[name]:
				state.Errors++
			}
		}
	}
}

// volumes are those on record, and what stays staged for volumes without a record.
type volumes struct {
	node     *admin.Node
	notify   *systemd.Notifier
	staged   func() []staging.Staged
	badFront error // which of the front's records could not be read at the start
}

func (v *volumes) findings() (_, out []string) {
	broker := v.node.Broker
	out = sys.Map(broker.Problems(), func(problem error) string { return refusal.WithAdvice(problem).Error() })
	if kept := broker.KeptClaims(); v.notify.CanStore() && kept > v.notify.Room() {
		out = append(out, fmt.Sprintf("%d devices are claimed, and systemd keeps %d descriptors over a restart: the others can be taken "+
			"while crust-proxy restarts; raise FileDescriptorStoreMax= of crust-proxy.service", kept, v.notify.Room()))
	}
	if v.badFront != nil {
		out = append(out, fmt.Sprintf("%v: a device that its driver has staged for it may stay staged", v.badFront))
	}
	return nil, out
}

func (v *volumes) measure(ctx context.Context, into *telemetry.NodeState) {
	all, calls := v.node.Each(), v.node.Sandboxes
	into.BadRecords = len(v.node.Broker.Problems())
	into.Volumes = count(v.node.EachShown(), func(status deferral.Status) (string, bool) {
		state := v.node.StateOf(status)
		addVolume(status, state, into)
		return state, true
	})
	// The sandboxes' last stats; kubelet requests them regularly.
	into.Abnormal = count(all, func(status deferral.Status) (string, bool) {
		known, ok := calls.Known(status.Volume)
		return "", ok && known.Condition != nil && known.Condition.Abnormal
	})
	into.GroupIgnored = count(all, func(status deferral.Status) (string, bool) {
		known, ok := calls.Known(status.Volume)
		return "", ok && known.GroupIgnored
	})
	into.Staged = v.stagedOnly(all)
	for _, handler := range calls.Handlers {
		into.Handlers[handler.Name()] = handler.Health(ctx) == nil
	}
}

// stagedOnly counts the devices that are staged through the front without a volume on record,
// as livingOf does. Records that cannot be read count as one such device.
func (v *volumes) stagedOnly(all iter.Seq[deferral.Status]) []telemetry.VolumeCount {
	var volumes []*volume.Volume
	for status := range all {
		volumes = append(volumes, status.Volume)
	}
	out := sys.Map(unpublished(v.staged(), volumes), func(one staging.Staged) telemetry.VolumeCount {
		return telemetry.VolumeCount{Driver: one.Driver, Count: 1}
	})
	if v.badFront != nil {
		out = append(out, telemetry.VolumeCount{Count: 1})
	}
	return out
}

// count counts volumes by driver, handler and the name that state returns, without those for which it returns false.
func count(all iter.Seq[deferral.Status], state func(deferral.Status) (string, bool)) []telemetry.VolumeCount {
	counts := make(map[telemetry.VolumeCount]int)
	for status := range all {
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

type lookups struct{ cluster *pods.Cluster }

// problems name no pod: anybody may read them.
func (l lookups) problems() []string {
	return sys.Map(l.cluster.State().Problems, func(problem string) string {
		return "pods cannot be looked up: " + problem + ": volumes of pods that are not known yet are refused"
	})
}

func (l lookups) findings() (_, out []string) {
	state := l.cluster.State()
	out = l.problems()
	for _, problem := range state.Unknown {
		out = append(out, fmt.Sprintf("%d pods have a volume that is not known; of %s", state.Incomplete, problem))
	}
	return nil, out
}

func (l lookups) measure(_ context.Context, into *telemetry.NodeState) {
	state := l.cluster.State()
	maps.Copy(into.Sources, state.Synced)
	into.Cluster = &telemetry.ClusterState{LastHeard: state.LastHeard, Pods: state.Pods, Incomplete: state.Incomplete}
}

// devices is who has a device open: whether that can be seen. Held devices are shown as volumes.
type devices struct {
	openers *openers.Finder
	broker  *deferral.Broker
}

func (d devices) findings() (out, _ []string) {
	if err := d.openers.Blind(); err != nil {
		_, why := d.openers.Method()
		out = append(out, fmt.Sprintf("it cannot be seen who has a device open, so that no volume can be staged or unstaged: %v; "+
			"the kernel's own count cannot be used: %v", err, why))
	}
	return out, nil
}

func (d devices) measure(_ context.Context, into *telemetry.NodeState) {
	into.Held = len(d.broker.Users().Held())
	into.Proof, _ = describeProof(d.openers)
}

// address is where metrics and health are served.
type address struct{ http *telemetry.Server }

func (a address) findings() (_, out []string) {
	if err := a.http.Problem(); err != nil {
		out = append(out, err.Error()+": free the address, or change http.listen and restart crust-proxy; volumes are served meanwhile")
	}
	return nil, out
}

func (address) measure(context.Context, *telemetry.NodeState) {}

// findings reports drivers that bypass the front. What is wrong with those behind it, ListDrivers tells.
func (f *driverFront) findings() (bypassed, out []string) {
	if f.cluster != nil {
		out = csiNodeFindings(f.cluster.State())
	}
	return slices.Collect(maps.Values(f.drivers.Bypassed())), out
}

// list returns the drivers behind the front, and then those that have left it with volumes, as not ready.
func (f *driverFront) list() []registry.State {
	all, away := f.drivers.List(), make(map[string][]string) // volumes that kubelet cannot unpublish
	for status := range f.volumes() {
		here := func(one registry.State) bool { return one.Name == status.Driver }
		if status.Origin != nil && !slices.ContainsFunc(all, here) {
			away[status.Driver] = append(away[status.Driver], describe(status.Volume))
		}
	}
	for _, driver := range slices.Sorted(maps.Keys(away)) {
		all = append(all, registry.State{Driver: registry.Driver{Name: driver}, Since: f.drivers.Left(driver), Problem: "it is not behind " +
			"crust-proxy any more, and its volumes cannot be given back until it is: " + living{volumes: away[driver]}.text()})
	}
	return all
}

func (f *driverFront) measure(_ context.Context, into *telemetry.NodeState) {
	for _, driver := range f.list() {
		// A second registrar of the same name is refused and does no harm.
		into.Drivers[driver.Name] = into.Drivers[driver.Name] || driver.Ready
		into.Missing[driver.Name] = into.Missing[driver.Name] || driver.Missing
	}
}

// hostMountsTime bounds one scan of the mount table. With 10,000 volumes it takes a fraction of a second.
const hostMountsTime = 5 * time.Second

// maxHostMounts bounds how many mounts of one volume are listed.
const maxHostMounts = 8

// hostMounts finds volumes whose device is mounted on the host. Concurrent callers share one scan.
type hostMounts struct {
	volumes func() iter.Seq[deferral.Status]
	scans   singleflight.Group
}

// findings names the volumes, each with the remedy, as errors. It ends when ctx ends.
func (h *hostMounts) findings(ctx context.Context) (errors, warnings []string) {
	shared := h.scans.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hostMountsTime)
		defer cancel()
		return h.scan(ctx)
	})
	var done singleflight.Result
	select {
	case done = <-shared:
	case <-ctx.Done():
		done.Err = ctx.Err()
	}
	if done.Err != nil {
		return nil, []string{fmt.Sprintf("it is not known whether devices of volumes are mounted on the host: %v", done.Err)}
	}
	errors, _ = done.Val.([]string)
	return errors, nil
}

// scan reads the mount table of this mount namespace once.
func (h *hostMounts) scan(ctx context.Context) (out []string, err error) {
	volumes, devices := h.volumes(), make(map[string]bool)
	number := func(v deferral.Status) string { return openers.Number(v.Device.Major, v.Device.Minor) }
	for v := range volumes {
		if v.Device.Kind == volume.BlockDevice {
			devices[number(v)] = true
		}
	}
	if len(devices) == 0 {
		return nil, ctx.Err()
	}
	points, err := sys.MountPoints(ctx, sys.MountTable, func(device string) bool { return devices[device] })
	for v := range volumes {
		if at := points[number(v)]; v.Device.Kind == volume.BlockDevice && len(at) > 0 {
			out = append(out, fmt.Sprintf("volume %s: its device %s is mounted on the host at %s: unmount it",
				v.Target, v.Device.Path, strings.Join(at[:min(maxHostMounts, len(at))], ", ")))
		}
	}
	return out, err
}
