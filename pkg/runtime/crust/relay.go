package crust

import (
	"context"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
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
	report, err := checkReport(v, id, out, h.cfg.DeviceSize)
	report.Sandbox = id
	if said := out.GetSandboxId(); abi.IsSandboxID(said) {
		h.bindings.bind(v.Key, said)
		report.Sandbox = said
	}
	return report, err
}

// Resize asks the volume's live sandbox to grow its filesystem.
func (h *Handler) Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error) {
	if r.Required < 0 || r.Limit < 0 || (r.Limit > 0 && r.Required > r.Limit) {
		return 0, volume.Errorf(volume.Invalid, "volume %s: %d to %d bytes is not a range of sizes", v.Target, r.Required, r.Limit)
	}
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
	return checkSize(v, id, r, out.GetCapacityBytes(), h.cfg.DeviceSize)
}

// Freeze holds all writes to the volume until Thaw, or until the timeout is over.
func (h *Handler) Freeze(ctx context.Context, v *volume.Volume, timeout time.Duration) error {
	if timeout < time.Second {
		return volume.Errorf(volume.Invalid, "volume %s: a freeze of %v is too short: give a second or more", v.Target, timeout)
	}
	h.expiry.frozen(timeout) // even if the answer gets lost
	_, err := h.asker.ask(ctx, v, &question{
		method: handlerv1.Handler_FreezeVolume_FullMethodName,
		words:  []string{abi.Freeze, v.ResolvedTarget, strconv.FormatInt(int64(timeout/time.Second), 10)},
		in: &handlerv1.FreezeVolumeRequest{
			TargetPath: v.ResolvedTarget, Timeout: durationpb.New(timeout.Truncate(time.Second)),
		},
		out: &handlerv1.FreezeVolumeResponse{},
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
