package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const mostNamed = 20

// living is what a removal would abandon: deferred volumes, and devices that only the front
// can unstage. It is read from the records, because the daemon may be down.
type living struct {
	volumes []string // one line each
	// unsure is why there may be more, or nil.
	unsure error
}

// livingOf reads the records of a state directory: all of them, or with throughFront those of
// volumes that came through the front; of all drivers, or of those named.
func livingOf(stateDir string, throughFront bool, drivers ...string) living {
	ours := func(driver string) bool { return len(drivers) == 0 || slices.Contains(drivers, driver) }
	var out living
	volumes, err := deferral.OnRecord(stateDir)
	devices, stagedErr := staging.StagedDevices(stateDir)
	out.unsure = errors.Join(err, stagedErr)
	for _, v := range volumes {
		if (v.Origin != nil || !throughFront) && ours(v.Driver) {
			out.volumes = append(out.volumes, describe(v))
		}
	}
	for _, one := range unpublished(devices, volumes) {
		if ours(one.Driver) {
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
func (l living) none() bool { return len(l.volumes) == 0 && l.unsure == nil }

func (l living) text() string {
	if len(l.volumes) == 0 && l.unsure != nil {
		return fmt.Sprintf("deferred volumes may live on this node: %v", l.unsure)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d deferred volume(s) live on this node:", len(l.volumes))
	for i, line := range l.volumes {
		if i == mostNamed {
			fmt.Fprintf(&b, "\n  and %d more", len(l.volumes)-i)
			break
		}
		b.WriteString("\n  " + line)
	}
	if l.unsure != nil {
		fmt.Fprintf(&b, "\nand there may be more: %v", l.unsure)
	}
	return b.String()
}

const (
	whatToDo = "\nDelete their pods, or drain the node, and try again."
	whatItIs = "\nTheir pods keep running and no data is lost; but without crust-proxy the volumes have neither stats nor growth, and nobody " +
		"takes their devices back when the pods go, until it is there again."
)

// mayLeave returns an error for a configuration without the front while volumes live that
// came through it.
func mayLeave(cfg *config.Config) error {
	if cfg.Front.Enabled || cfg.Front.AbandonVolumes {
		return nil
	}
	found := livingOf(cfg.StateDir(), true)
	if found.none() {
		return nil
	}
	return errors.New("front.enabled: false cannot be put in force: " + found.text() + whatToDo +
		" To leave them as they are, set front.abandonVolumes: true." + whatItIs)
}

// mayStart is mayLeave for a start, which a record that cannot be read does not prevent: the daemon
// has to hold the device of its volume, and to serve the others.
func mayStart(cfg *config.Config) error {
	if len(livingOf(cfg.StateDir(), true).volumes) == 0 {
		return nil
	}
	return mayLeave(cfg)
}

// leaveFront prepares a start without the front. It removes the registrations of the drivers
// that were behind it: kubelet would call sockets that nobody serves, and would not accept
// the drivers from anybody else.
func leaveFront(cfg *config.Config, log *zap.Logger) error {
	if cfg.Front.Enabled {
		return nil
	}
	if err := mayStart(cfg); err != nil {
		return err
	}
	if found := livingOf(cfg.StateDir(), true); !found.none() {
		log.Warn("the front is off, and not all volumes that came through it are known to be gone: " + found.text())
	}
	for _, path := range registry.Withdraw(cfg.Front.KubeletRegistry) {
		log.Info("the registration of a driver was taken from kubelet, for the front is off: " + path)
	}
	return nil
}

// removable checks whether crust-proxy can be removed from this node, or drivers from behind
// it, without abandoning volumes.
func removable(_ context.Context, call invocation) error {
	cfg, err := call.flags.Load()
	if err != nil {
		return err
	}
	found := livingOf(cfg.StateDir(), len(call.args) > 0, call.args...)
	switch {
	case found.none():
		_, err = fmt.Fprintf(call.stdout, "No deferred volume lives on this node, by the records below %s.\n", cfg.StateDir())
		return err
	case call.flags.Abandon: // not the key, which an earlier start without the front may have left there
		_, err = fmt.Fprintln(call.stderr, "crust-proxy: warning: "+found.text()+whatItIs)
		return err
	}
	return errors.New(found.text() + whatToDo + " To leave them as they are: --abandon-volumes." + whatItIs)
}

func withdraw(_ context.Context, call invocation) error {
	cfg, err := call.flags.Load()
	if err != nil {
		return err
	}
	for _, path := range registry.Withdraw(cfg.Front.KubeletRegistry) {
		if _, err := fmt.Fprintln(call.stdout, path); err != nil {
			return err
		}
	}
	return nil
}
