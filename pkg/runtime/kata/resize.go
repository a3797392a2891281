package kata

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Resize asks the volume's live sandbox to grow its filesystem. No known Kata release can; the
// success of a later one is believed.
func (h *Handler) Resize(ctx context.Context, v *volume.Volume, r volume.Range) (int64, error) {
	if err := ctx.Err(); err != nil {
		return 0, guest.ContextError(v, "", err)
	}
	size := r.Required
	if size <= 0 {
		var known bool
		if size, known = claim.DeviceSize(v.Device); !known || r.Limit != 0 && size > r.Limit {
			return 0, volume.Errorf(volume.Invalid, "volume %s: the wished size is missing: give required_bytes", v.Target)
		}
	}
	c, b, err := h.client.connect(ctx, v)
	if err != nil {
		return 0, err
	}
	request, err := h.resizeRequest(ctx, v, b, size)
	if err != nil {
		c.close()
		return 0, err
	}
	rep, err := c.ask(ctx, v, b.id, request)
	switch {
	case err == nil && rep.status == 200:
		return size, nil
	case err == nil:
		err = statusError(v, "resize", b, rep)
	case b.flavor == rustShim && errors.Is(err, errHungUp) && h.client.lives(ctx, b):
		err = volume.Errorf(volume.Unsupported, "volume %s: Kata sandbox %s (%s) ended the call without an answer, which is "+
			"how it says that its agent refused", v.Target, b.id, b.flavor)
	}
	if volume.KindOf(err) == volume.Unsupported {
		return 0, volume.Errorf(volume.Unsupported, "%w", fmt.Errorf("%w: %w", err, volume.ErrNeverGrows))
	}
	return 0, err
}

func (h *Handler) resizeRequest(ctx context.Context, v *volume.Volume, b shim, size int64) ([]byte, error) {
	if b.flavor == goShim {
		return resizePost("/direct-volume/resize", map[string]any{"VolumePath": v.Device.Path, "Size": size})
	}
	path, err := h.guestPath(ctx, v, b.id)
	if err != nil {
		return nil, err
	}
	return resizePost("http://shim/direct-volume/resize", map[string]any{"volume_guest_path": path, "size": size})
}

// guestPath returns the volume's path in a runtime-rs sandbox. Only an answer to stats confirms a path.
func (h *Handler) guestPath(ctx context.Context, v *volume.Volume, id string) (string, error) {
	for asked := false; ; asked = true {
		if path := h.guests.path(v.Key, id); path != "" && h.bindings.current(v).id == id {
			return path, nil
		}
		if asked {
			return "", volume.Errorf(volume.Busy, "volume %s: its sandbox changed while it was asked for the volume's path", v.Target)
		}
		if _, err := h.Stats(ctx, v); err != nil {
			return "", err
		}
	}
}

func resizePost(target string, content map[string]any) ([]byte, error) {
	body, err := json.Marshal(content)
	if err != nil {
		return nil, volume.Errorf(volume.Internal, "the resize request cannot be encoded: %w", err)
	}
	head := "POST " + target + " HTTP/1.1\r\nHost: shim\r\nContent-Type: application/json\r\nContent-Length: " +
		strconv.Itoa(len(body)) + "\r\n\r\n"
	return append([]byte(head), body...), nil
}
