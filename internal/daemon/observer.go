package daemon

import (
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/history"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// volumeObserver is told by the broker and the front what happens to volumes.
type volumeObserver struct{ daemon *daemon }

// Changed notifies watchers. It also forgets what was known about a volume that is gone, or
// that another program published and no sandbox has.
func (o volumeObserver) Changed(key volume.Key) {
	d := o.daemon
	if d.sandboxes != nil {
		_, known := d.broker.Get(key)
		if !known {
			_, known = d.handlers.Binding(&volume.Volume{Key: key})
		}
		if !known {
			d.sandboxes.Relay.Forget(key)
			d.disks.reader.Forget(key)
		}
	}
	d.hub.Changed(key)
}

func (o volumeObserver) Published(v *volume.Volume) { o.daemon.metrics.Published(v.Driver, v.Handler) }

// Leaving looks for errors in a filesystem that its sandbox has unmounted: by then the guest's kernel has recorded
// those that it found.
func (o volumeObserver) Leaving(v *volume.Volume) {
	super := o.daemon.disks.reader.Super(v, 0)
	if super == nil || super.Errors == nil {
		return
	}
	o.daemon.log.Warn("a volume is given back with errors on record", append(about(v), zap.String("condition", super.Errors.Words()))...)
	o.daemon.metrics.LeftWithErrors(v.Driver, v.Handler)
	o.daemon.history.Did(v, history.Left, "crust-proxy", v.FSType, errors.New(super.Errors.Words()))
}

// OrphanEnded is called for a process that was ended, and for one that could not be.
func (o volumeObserver) OrphanEnded(v *volume.Volume, one deferral.Orphan, by string, err error) {
	d := o.daemon
	d.metrics.OrphanEnded(err == nil)
	text, what := "a process that could not be examined", "what could not be examined, and may be an orphan,"
	if one.PID != 0 {
		text, what = fmt.Sprintf("process %d (%q) of sandbox %s", one.PID, one.Program, one.Sandbox), "an orphan"
	}
	d.history.Did(v, history.Ended, by, text, err)
	fields := append(about(v), zap.String("by", by), zap.Int("pid", one.PID), zap.String("program", one.Program),
		zap.String("control_group", one.ControlGroup), zap.String("sandbox", one.Sandbox), zap.String("why", one.Why))
	if err != nil {
		d.log.Error(what+" keeps a volume", append(fields, zap.Error(err))...)
		return
	}
	d.log.Warn("an orphan that kept a volume was ended", fields...)
}

// Refused counts and records a refusal of the front.
func (o volumeObserver) Refused(one *refusal.Refusal) {
	o.daemon.metrics.VolumeRefused(one.Driver, string(one.Party))
	o.daemon.history.Refused(one)
}

func (o volumeObserver) ClaimRefused(kind volume.Kind) { o.daemon.metrics.ClaimRefused(kind.String()) }

// podReasons are the events of a volume that its pod's user should know, and their reasons in Kubernetes.
var podReasons = map[string]string{
	history.Refused: "VolumeRefused", history.Repaired[0]: "VolumeRepaired", history.Repaired[1]: "VolumeRepairFailed",
	history.UnpublishFailed: "VolumeReleaseFailed", history.Left[1]: "VolumeLeftWithErrors",
	history.Ended[0]: "VolumeOrphanEnded", history.Ended[1]: "VolumeOrphanStays",
}

// podObserver offers what pods should know of the history of volumes. What repeats is offered at its second, fourth,
// eighth time and so on.
func podObserver(offer func(pods.Event)) func(*adminv1.VolumeEvent) {
	return func(e *adminv1.VolumeEvent) {
		reason, n := podReasons[e.GetWhat()], e.GetCount()
		if reason == "" || !sys.Rarely(n) || slices.Contains([]string{e.GetPodNamespace(), e.GetPodName(), e.GetPodUid()}, "") {
			return
		}
		offer(pods.Event{
			Namespace: e.GetPodNamespace(), Pod: e.GetPodName(), UID: e.GetPodUid(), Warning: e.GetFailed(), Reason: reason, Text: e.GetText(),
			Count: int32(min(n, 1<<30)), First: e.GetFirstAt().AsTime(), Last: e.GetLastAt().AsTime(), //nolint:gosec // it is bounded here
		})
	}
}
