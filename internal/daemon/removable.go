package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const mostNamed = 20

// living is what a removal would abandon: deferred volumes, devices that only the front can
// unstage, and drivers behind it. It is read from files, because the daemon may be down.
type living struct {
	volumes []string // one line each
	drivers []string // registered with kubelet through the front
	// unsure is why there may be more, or nil.
	unsure error
}

// livingOf is what onRecord finds below any root, and guards without a record, which may be of any driver.
func livingOf(cfg *config.Config, throughFront bool, drivers ...string) living {
	out := onRecord(cfg, "/", throughFront, drivers...)
	lost, err := guard.NewRoot(cfg.KubeletRoot, "").Points(context.Background(), func(key volume.Key) bool { return deferral.HasRecord(cfg.StateDir(), key) })
	out.unsure = errors.Join(out.unsure, err)
	for _, point := range slices.Sorted(maps.Values(lost)) {
		out.unsure = errors.Join(out.unsure, fmt.Errorf("%s has a guard and no record", point))
	}
	return out
}

// onRecord reads the records below a run directory: all of them, or with throughFront those of volumes that came through
// the front; of all drivers, or of those named; of paths below a root.
func onRecord(cfg *config.Config, root string, throughFront bool, drivers ...string) living {
	ours := func(driver, path string) bool {
		return sys.Within(root, path) && (len(drivers) == 0 || slices.Contains(drivers, driver))
	}
	volumes, held, err := deferral.OnRecord(cfg.StateDir(), !throughFront || len(drivers) > 0) // held ones need no call of the front
	devices, stagedErr := staging.StagedDevices(cfg.StateDir())
	out := living{unsure: errors.Join(err, stagedErr)}
	for i, v := range slices.Concat(volumes, held) {
		if what := describe(v); (v.Origin != nil || !throughFront) && (ours(v.Driver, v.Target) || ours(v.Driver, v.ResolvedTarget)) {
			if i >= len(volumes) {
				what += ", released by force while it was open: crustctl doctor says how to end what has it"
			}
			out.volumes = append(out.volumes, what)
		}
	}
	for _, one := range unpublished(devices, volumes) {
		if ours(one.Driver, one.Path) {
			out.volumes = append(out.volumes, fmt.Sprintf("%.200q of driver %s, staged at %s", one.VolumeID, one.Driver, one.Path))
		}
	}
	return out
}

// unpublished returns the devices that are staged without a volume on record.
func unpublished(staged []staging.Staged, volumes []*volume.Volume) []staging.Staged {
	published := make(map[staging.VolumeID]bool)
	for _, v := range volumes {
		if v.Origin != nil {
			published[staging.VolumeID{Driver: v.Driver, ID: v.Origin.VolumeID}] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(staged), func(one staging.Staged) bool {
		return published[staging.VolumeID{Driver: one.Driver, ID: one.VolumeID}]
	})
}

func describe(v *volume.Volume) string {
	text := v.Target + " (driver " + cmp.Or(v.Driver, "unknown") + ", handler " + v.Handler
	if v.Origin != nil && v.Origin.PodName != "" {
		text += ", pod " + v.Origin.PodNamespace + "/" + v.Origin.PodName
	}
	return text + ")"
}

// none reports whether it is certain that nothing lives.
func (l living) none() bool { return len(l.volumes)+len(l.drivers) == 0 && l.unsure == nil }

func (l living) text() string {
	var lines []string
	if n := len(l.volumes); n > 0 {
		lines = append(lines, fmt.Sprintf("%d deferred volume(s) live on this node:\n  %s", n, firstOf(l.volumes)))
	}
	if len(l.drivers) > 0 {
		lines = append(lines, fmt.Sprintf("%d CSI driver(s) are behind the front: %s", len(l.drivers), strings.Join(l.drivers, ", ")))
	}
	if l.unsure != nil {
		lines = append(lines, fmt.Sprintf("deferred volumes may live on this node, as not all records can be read: %s", firstOf(strings.Split(l.unsure.Error(), "\n"))))
	}
	return strings.Join(lines, "\n")
}

// firstOf joins the first lines, and counts the others.
func firstOf(lines []string) string {
	if n := len(lines) - mostNamed; n > 0 {
		lines = append(slices.Clone(lines[:mostNamed]), fmt.Sprintf("and %d more", n))
	}
	return strings.Join(lines, "\n  ")
}

// refusal is text, with what the user can do; the override leaves all as it is.
func (l living) refusal(override string, uid int) string {
	text := l.text()
	if errors.Is(l.unsure, os.ErrPermission) && uid != 0 {
		return text + "\nRun it as root."
	}
	if len(l.drivers) > 0 {
		text += "\nWithout the front kubelet has these drivers for no volume. Move them back (docs/kubernetes.md, Removal), and try again. " +
			"Those of a crust-proxy that has ended for good: crust-proxy withdraw."
	}
	if len(l.volumes) > 0 || l.unsure != nil {
		text += "\nDelete the pods of the volumes, or drain the node, and try again." + whatItIs
	}
	return text + "\nTo leave all as it is: " + override
}

const whatItIs = "\nTheir pods keep running and no data is lost; but without crust-proxy the volumes have neither stats nor growth, and nobody " +
	"takes their devices back when the pods go, until it is there again."

// mayLeave returns an error for a configuration without the front that follows one with it, while volumes live that
// came through it, or drivers are behind it. After a boot it is not known which are, until they had time to come.
func mayLeave(before, next *config.Config) error {
	if next.Front.Enabled || next.Front.AbandonVolumes {
		return nil
	}
	found := livingOf(before, true)
	found.drivers = registry.Registered(before.Front.KubeletRegistry)
	why := found.refusal("front.abandonVolumes: true", os.Geteuid())
	if found.none() {
		came, err := os.ReadDir(before.CSISockets()) // a driver's socket stays until a boot
		made, statErr := os.Stat(before.CSISockets())
		if len(came) > 0 || err == nil && statErr == nil && time.Since(made.ModTime()) > 10*time.Minute { // since the first start
			return nil
		}
		why = "no driver has come to the front since the boot, and some may still come. " +
			"Restart crust-proxy when crustctl drivers has listed none for ten minutes."
	}
	return fmt.Errorf("%w: %s", errFrontStays, why)
}

var errFrontStays = errors.New("front.enabled: false (the default) cannot be put in force")

// mayMove returns an error for another run directory or kubelet root that loses volumes. Those of guards without a record
// are lost already, and it may find them. If neither is the same, the daemon is that of another kubelet.
func mayMove(before, next *config.Config) error {
	if next.Front.AbandonVolumes || (before.RunDir == next.RunDir) == (before.KubeletRoot == next.KubeletRoot) {
		return nil
	}
	if found := onRecord(before, before.KubeletRoot, false); !found.none() {
		return fmt.Errorf("runDir and kubeletRoot cannot be changed: %s", found.refusal("front.abandonVolumes: true", os.Geteuid()))
	}
	return nil
}

// mayStart is mayMove and mayLeave for a start after the configuration that was accepted last. If that has no front, or there is
// none, only a volume that is known to live prevents the start: the daemon has to hold the devices of the others.
func mayStart(flags *config.Flags, cfg *config.Config) error {
	before, _, err := flags.LoadAccepted()
	if err != nil || flags.Accepted == "" {
		before = *cfg
	}
	if moved := mayMove(&before, cfg); moved != nil || cfg.Front.Enabled {
		return moved
	}
	if !before.Front.Enabled {
		if before = *cfg; len(onRecord(cfg, "/", true).volumes) == 0 {
			return nil
		}
	}
	return mayLeave(&before, cfg)
}

// leaveFront checks whether the daemon may start, and prepares a start without the front. It removes the registrations of
// the drivers that were behind it: kubelet would call sockets that nobody serves, and accept the drivers from nobody else.
func leaveFront(flags *config.Flags, cfg *config.Config, log *zap.Logger) error {
	if err := mayStart(flags, cfg); err != nil || cfg.Front.Enabled {
		return err
	}
	if found := onRecord(cfg, "/", true); !found.none() {
		log.Warn("the front is off, and not all volumes that came through it are known to be gone: " + found.text())
	}
	for _, path := range registry.Withdraw(cfg.Front.KubeletRegistry) {
		log.Info("the registration of a driver was taken from kubelet, for the front is off: " + path)
	}
	return nil
}

// removable checks whether crust-proxy can be removed from this node, or drivers from behind
// it, without abandoning volumes or other drivers.
func removable(_ context.Context, call invocation) error {
	cfg, err := call.flags.Load()
	if err != nil {
		return err
	}
	found := livingOf(&cfg, len(call.args) > 0, call.args...)
	behind, what, unknown := registry.Registered(cfg.Front.KubeletRegistry), "deferred volume", ""
	if len(call.args) == 0 {
		found.drivers = behind
	} else {
		what += " of " + strings.Join(call.args, ", ")
	}
	for _, driver := range call.args {
		if !slices.Contains(behind, driver) {
			unknown += " " + driver + " is not behind the front now: see that its name is right."
		}
	}
	switch {
	case found.none():
		_, err = fmt.Fprintf(call.stdout, "No %s lives on this node, by the records below %s.%s\n", what, cfg.StateDir(), unknown)
		return err
	case call.flags.Abandon: // not the key, which an earlier start without the front may have left there
		_, err = fmt.Fprintln(call.stderr, "crust-proxy: warning: "+found.text()+whatItIs)
		return err
	}
	return errors.New(found.refusal("--abandon-volumes", os.Geteuid()))
}

func withdraw(_ context.Context, call invocation) error {
	cfg, err := call.flags.Load()
	if err != nil {
		return err
	}
	for _, path := range registry.Withdraw(cfg.Front.KubeletRegistry) {
		_, failed := fmt.Fprintln(call.stdout, path)
		err = errors.Join(err, failed)
	}
	return err
}

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
	slices.Sort(nodes)
	problems := make([]error, len(nodes)) // of each node with volumes, and of each that did not answer
	sys.Each(askedAtOnce, slices.All(nodes), func(i int, node string) {
		if problems[i] = askNode(ctx, net.JoinHostPort(node, port), own); problems[i] != nil {
			problems[i] = fmt.Errorf("node %s: %w", node, problems[i])
		}
	})
	if err := errors.Join(problems...); err != nil {
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
		found = append(found, fmt.Sprintf("%d deferred volume(s) live there, of driver %s", count, strings.Join(slices.Compact(of), ", ")))
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
