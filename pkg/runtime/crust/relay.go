package crust

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// Stats asks the volume's live sandbox for its usage.
func (h *Handler) Stats(ctx context.Context, v *volume.Volume) (volume.Report, error) {
	out := &handlerv1.GetVolumeStatsResponse{}
	id, err := h.asker.ask(ctx, v, &question{
		method: handlerv1.Handler_GetVolumeStats_FullMethodName, words: []string{abi.Stats, v.ResolvedTarget},
		in: &handlerv1.GetVolumeStatsRequest{TargetPath: v.ResolvedTarget}, out: out,
	})
	if err != nil {
		return volume.Report{}, err
	}
	report, err := checkReport(v, id, out)
	report.Sandbox = id
	if said := out.GetSandboxId(); abi.IsSandboxID(said) {
		h.bindings.bind(v.Key, said)
		report.Sandbox = said
	}
	return report, err
}

// Resize asks the volume's live sandbox to grow its filesystem.
func (h *Handler) Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error) {
	out := &handlerv1.ResizeVolumeResponse{}
	id, err := h.asker.ask(ctx, v, &question{
		method: handlerv1.Handler_ResizeVolume_FullMethodName,
		words: []string{
			abi.Resize, v.ResolvedTarget, strconv.FormatInt(r.Required, 10), strconv.FormatInt(r.Limit, 10),
		},
		in: &handlerv1.ResizeVolumeRequest{
			TargetPath:    v.ResolvedTarget,
			CapacityRange: &runtimev1.CapacityRange{RequiredBytes: r.Required, LimitBytes: r.Limit},
		},
		out: out,
	})
	if err != nil {
		return 0, err
	}
	size := out.GetCapacityBytes()
	if size <= 0 || size < r.Required || (r.Limit > 0 && size > r.Limit) {
		return 0, volume.Errorf(volume.Absurd, "volume %s: the handler of sandbox %s says that it has %d bytes now, "+
			"and was asked for %d to %d", v.Target, id, size, r.Required, r.Limit)
	}
	if device, known := claim.DeviceSize(v.Device); known && size > device {
		return 0, volume.Errorf(volume.Absurd, "volume %s: the handler of sandbox %s says that it has %d bytes now, "+
			"on a device of %d", v.Target, id, size, device)
	}
	return size, nil
}

// Freeze holds all writes to the volume until Thaw, or until the timeout is over.
func (h *Handler) Freeze(ctx context.Context, v *volume.Volume, timeout time.Duration) error {
	if timeout < time.Second {
		return volume.Errorf(volume.Invalid, "volume %s: a freeze of %v is too short: give a second or more", v.Target, timeout)
	}
	h.expiry.frozen(timeout)       // even if the answer gets lost
	defer h.expiry.frozen(timeout) // its time begins when the dirty data is written
	_, err := h.asker.ask(ctx, v, &question{
		method: handlerv1.Handler_FreezeVolume_FullMethodName,
		words:  []string{abi.Freeze, v.ResolvedTarget, strconv.FormatInt(int64(timeout/time.Second), 10)},
		in: &handlerv1.FreezeVolumeRequest{
			TargetPath: v.ResolvedTarget, Timeout: durationpb.New(timeout.Truncate(time.Second)),
		},
		out: &handlerv1.FreezeVolumeResponse{}, once: true,
	})
	return err
}

// Thaw lets writes to the volume go on. It also works if the sandbox has ended: the
// filesystem can still be frozen, and the handler can thaw it.
func (h *Handler) Thaw(ctx context.Context, v *volume.Volume) error {
	q := &question{
		method: handlerv1.Handler_ThawVolume_FullMethodName, words: []string{abi.Thaw, v.ResolvedTarget},
		in: &handlerv1.ThawVolumeRequest{TargetPath: v.ResolvedTarget}, out: &handlerv1.ThawVolumeResponse{},
	}
	_, err := h.asker.ask(ctx, v, q)
	if err == nil || volume.KindOf(err) != volume.NoSandbox {
		return err
	}
	return h.asker.thawForgotten(ctx, v, q, err)
}

// InUse returns a sandbox that has the volume or may have it. One that answers wrongly, or
// not in time, counts as alive.
func (h *Handler) InUse(ctx context.Context, v *volume.Volume) (string, error) {
	seen, err := h.bindings.readDir(v)
	if err != nil || len(seen.ids) == 0 {
		return "", err
	}
	bounded, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	_, err = h.Stats(bounded, v)
	switch volume.KindOf(err) {
	case volume.NoSandbox:
		return "", nil
	case volume.Canceled:
		return "", err
	case volume.Denied, volume.Internal, volume.Unsupported: // it cannot be asked
		lives := func(id string) bool { return !h.bindings.isGone(id) }
		if err != nil && !slices.ContainsFunc(seen.ids, lives) {
			return "", nil
		}
	}
	if b, bound := h.Binding(v); bound {
		return b.Sandbox, nil
	}
	return seen.ids[0], nil
}

// checkReport checks a handler's answer to stats. It describes a filesystem that a workload
// can write to, and is trusted no more than the workload.
func checkReport(v *volume.Volume, id string, said *handlerv1.GetVolumeStatsResponse) (volume.Report, error) {
	report, err := readReport(said)
	if err == nil {
		err = guest.CheckSize(v, report)
	}
	switch {
	case errors.Is(err, guest.ErrAbsurd):
		return volume.Report{}, volume.Errorf(volume.Absurd, "volume %s: the handler of sandbox %s answered with "+
			"stats that cannot be true: %w", v.Target, id, err)
	case err != nil:
		return volume.Report{}, malformed(v, id, err)
	}
	return report, nil
}

func malformed(v *volume.Volume, id string, err error) error {
	return volume.Errorf(volume.Malformed, "volume %s: the handler of sandbox %s sent an answer that cannot be read: %s",
		v.Target, id, guest.Printable(err.Error(), guest.MaxErrorText))
}

func readReport(said *handlerv1.GetVolumeStatsResponse) (volume.Report, error) {
	usages := make([]volume.Usage, 0, len(said.GetUsage()))
	for _, u := range said.GetUsage() {
		usages = append(usages, volume.Usage{
			Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: guest.Unit(int64(u.GetUnit())),
		})
	}
	var condition *volume.Condition
	if c := said.GetVolumeCondition(); c != nil {
		condition = &volume.Condition{Abnormal: c.GetAbnormal(), Message: c.GetMessage(), Reason: c.GetReason()}
	}
	return guest.Report(usages, condition)
}

func refusal(v *volume.Volume, id string, kind volume.Kind, verb, text string) error {
	for _, known := range []string{"volume " + v.ResolvedTarget + ": ", "sandbox " + id + ": "} { // our error says so itself
		text = strings.Replace(text, known, "", 1)
	}
	text = cmp.Or(guest.Printable(oneLine(text), guest.MaxErrorText), "it gave no reason")
	switch kind {
	case volume.NoSandbox:
		return volume.Errorf(kind, "volume %s: the sandbox %s does not have it any more: %s", v.Target, id, text)
	case volume.Unsupported:
		return volume.Errorf(kind, "volume %s: the handler of sandbox %s cannot do %s: %s", v.Target, id, verb, text)
	default:
		return volume.Errorf(kind, "volume %s: the handler of sandbox %s refused %s: %s", v.Target, id, verb, text)
	}
}
