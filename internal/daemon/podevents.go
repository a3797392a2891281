package daemon

import (
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/daemon/history"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

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
