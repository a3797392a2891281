package history

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// words name what a call does, and that it failed to. Other calls change nothing, or are reported in another way.
var words = map[string][2]string{
	csi.Node_NodeStageVolume_FullMethodName:               {staged, "stage failed"},
	csi.Node_NodeUnstageVolume_FullMethodName:             {unstaged, "unstage failed"},
	csi.Node_NodePublishVolume_FullMethodName:             {published, "publish failed"},
	csi.Node_NodeUnpublishVolume_FullMethodName:           {unpublished, UnpublishFailed},
	csi.Node_NodeExpandVolume_FullMethodName:              {"grown", "growth failed"},
	runtimev1.Runtime_RuntimeStageVolume_FullMethodName:   {published, "publish failed"},
	runtimev1.Runtime_RuntimeUnstageVolume_FullMethodName: {unpublished, UnpublishFailed},
	runtimev1.Runtime_RuntimeExpandVolume_FullMethodName:  {"grown", "growth failed"},
	adminv1.Admin_ExpandVolume_FullMethodName:             {"grown", "growth failed"},
	adminv1.Admin_FreezeVolume_FullMethodName:             {"frozen", "freeze failed"},
	adminv1.Admin_ThawVolume_FullMethodName:               {"thawed", "thaw failed"},
	adminv1.Admin_ReleaseVolume_FullMethodName:            {released, "release failed"},
}

const (
	staged    = "staged"
	unstaged  = "unstaged"
	published = "published"
	bound     = "bound"
	unbound   = "unbound"
	// The last of a volume.
	unpublished = "unpublished"
	released    = "released"
)

// Refused is a volume that could not be staged or published, UnpublishFailed one that could not be given back.
const (
	Refused         = "refused"
	UnpublishFailed = "unpublish failed"
)

// Repaired and Ended name what crust-proxy does by itself.
var (
	Repaired = [2]string{"repaired", "repair failed"}
	Ended    = [2]string{"ended", "end failed"}
	// Left is a volume that was given back with errors on record.
	Left = [2]string{"left", "left with errors"}
)

// Call records a call that changed a volume, or failed to: it is telemetry.Interceptors.Ended. Refusals of the front
// come by Refused.
func (h *History) Call(ctx context.Context, method string, call *telemetry.Call, failure string) {
	word, recorded := words[method]
	if !recorded || failure == "" && call.Repeated {
		return
	}
	ofFront := strings.HasPrefix(method, "/csi.")
	isRefusal := failure != "" && (word[0] == staged || word[0] == published)
	if ofFront && isRefusal || !isRefusal && !h.follows(call) {
		return
	}
	e := &adminv1.VolumeEvent{
		What: word[1], Failed: failure != "", By: "kubelet", Text: failure,
		Id: call.Volume, TargetPath: call.Target, Driver: call.Driver, VolumeId: call.CSIVolume, Handler: call.Handler,
		PodUid: kubelet.PodOf(call.Target),
	}
	e.PodNamespace, e.PodName, _ = strings.Cut(call.Pod, "/")
	if failure == "" {
		e.What, e.Text = word[0], describe(word[0], call)
	}
	if who, ok := peercred.FromContext(ctx); ok && !ofFront {
		e.By = who.CallerOf(strings.TrimPrefix(path.Ext(path.Dir(method)), "."))
	}
	h.Add(e)
}

// follows reports whether a call is for a volume that is deferred, kept on the host by a rule, or has a history.
func (h *History) follows(call *telemetry.Call) bool {
	return call.Volume != "" || call.Handler != "" || policy.IsRule(call.Rule) ||
		h.latest(&adminv1.VolumeEvent{Driver: call.Driver, VolumeId: call.CSIVolume}, nil) != nil
}

func describe(what string, call *telemetry.Call) string {
	switch {
	case call.Detail != "":
		return call.Detail
	case call.Handler == "" && call.Volume == "" && what != unstaged:
		if policy.IsRule(call.Rule) {
			return "not deferred, by " + call.Rule
		}
		return "not deferred"
	case what != staged && what != published:
		return ""
	case call.Rule == "":
		return "for " + call.Handler
	default:
		return "for " + call.Handler + ", by " + call.Rule
	}
}

// Refused records a volume that the front refused to stage or to publish.
func (h *History) Refused(r *refusal.Refusal) {
	_, text, _ := strings.Cut(r.Error, ": ") // it begins with volume and pod
	h.Add(&adminv1.VolumeEvent{
		What: Refused, Failed: true, By: "kubelet", Text: fmt.Sprintf("(%s) %s", r.Party, text), Id: string(r.Key), TargetPath: r.Target,
		Driver: r.Driver, VolumeId: r.VolumeID, Handler: r.Handler, PodNamespace: r.PodNamespace, PodName: r.PodName, PodUid: r.PodUID, PvcName: r.PVC,
	})
}

// Did records what crust-proxy itself did to a volume, or failed to do: what[1].
func (h *History) Did(v *volume.Volume, what [2]string, by, text string, err error) {
	e := eventOf(v)
	e.What, e.By, e.Text = what[0], by, text
	if err != nil {
		e.What, e.Failed, e.Text = what[1], true, text+": "+err.Error()
	}
	h.Add(e)
}

// Bound records that a sandbox has a volume, or with an empty id that none has, unless the history says so already:
// after a restart each binding is found again.
func (h *History) Bound(v *volume.Volume, binding runtime.Binding) {
	e := eventOf(v)
	e.What, e.By, e.Text = bound, "sandbox", strings.TrimSpace(binding.Sandbox+" "+binding.Runtime)
	if e.GetText() == "" {
		e.What = unbound
	}
	before := h.latest(e, func(old *adminv1.VolumeEvent) bool {
		return old.GetId() == e.GetId() && (old.GetWhat() == bound || old.GetWhat() == unbound)
	})
	if before.GetText() != e.GetText() {
		h.Add(e)
	}
}

// latest returns the newest event of a volume that matches, or nil. A nil match is that of any.
func (h *History) latest(of *adminv1.VolumeEvent, match func(*adminv1.VolumeEvent) bool) *adminv1.VolumeEvent {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range slices.Backward(h.volumes[nameOf(of)]) {
		if match == nil || match(e) {
			return e
		}
	}
	return nil
}

func eventOf(v *volume.Volume) *adminv1.VolumeEvent {
	e := &adminv1.VolumeEvent{Id: string(v.Key), TargetPath: v.Target, Driver: v.Driver, Handler: v.Handler, PodUid: v.PodUID}
	if of := v.Origin; of != nil {
		e.VolumeId, e.PodNamespace, e.PodName, e.PvcName = refusal.Clip(of.VolumeID), of.PodNamespace, of.PodName, of.PVC
	}
	return e
}
