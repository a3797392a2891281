package kata

import (
	"context"
	"encoding/json"
	"strconv"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// Resize asks the volume's live sandbox to grow its filesystem. No Kata release
// known today can; one that could would be believed.
func (h *Handler) Resize(ctx context.Context, v *deferral.Volume, r deferral.Range) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, contextError(v, "", err)
	}
	size, err := h.wishedSize(v, r)
	if err != nil {
		return 0, err
	}
	rep, b, err := h.call(ctx, v, func(b binding) ([]byte, error) { return h.resizeRequest(ctx, v, b, size) })
	if err != nil {
		return 0, err
	}
	if rep.status == 200 {
		return size, nil
	}
	err = statusError(v, "resize", b, rep)
	if deferral.KindOf(err) == deferral.Unsupported {
		return 0, deferral.Errorf(deferral.Unsupported, "%w. Kata cannot grow a filesystem while a sandbox has it: "+
			"grow the volume, then delete the pod so that a new one mounts it", err)
	}
	return 0, err
}

func (h *Handler) wishedSize(v *deferral.Volume, r deferral.Range) (int64, error) {
	if r.Required < 0 || r.Limit < 0 || (r.Limit > 0 && r.Required > r.Limit) {
		return 0, deferral.Errorf(deferral.Invalid, "volume %s: %d to %d bytes is not a range of sizes", v.Target, r.Required, r.Limit)
	}
	if r.Required > 0 {
		return r.Required, nil
	}
	if h.cfg.DeviceSize != nil {
		if size, known := h.cfg.DeviceSize(v); known && (r.Limit == 0 || size <= r.Limit) {
			return size, nil
		}
	}
	return 0, deferral.Errorf(deferral.Invalid, "volume %s: the wished size is missing: give required_bytes", v.Target)
}

func (h *Handler) resizeRequest(ctx context.Context, v *deferral.Volume, b binding, size int64) ([]byte, error) {
	if b.flavor == goShim {
		return resizePost("/direct-volume/resize", map[string]any{"VolumePath": v.Device.Path, "Size": size})
	}
	guest, err := h.guestPath(ctx, v, b.id)
	if err != nil {
		return nil, err
	}
	return resizePost("http://shim/direct-volume/resize", map[string]any{"volume_guest_path": guest, "size": size})
}

func resizePost(target string, content map[string]any) ([]byte, error) {
	body, err := json.Marshal(content)
	if err != nil {
		return nil, deferral.Errorf(deferral.Internal, "the resize request cannot be encoded: %w", err)
	}
	head := "POST " + target + " HTTP/1.1\r\nHost: shim\r\nContent-Type: application/json\r\nContent-Length: " +
		strconv.Itoa(len(body)) + "\r\n\r\n"
	return append([]byte(head), body...), nil
}
