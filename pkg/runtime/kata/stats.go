package kata

import (
	"context"
	"errors"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
)

const statsPath = "/direct-volume/stats?path="

// Stats asks the volume's live sandbox for its usage.
func (h *Handler) Stats(ctx context.Context, v *deferral.Volume) (deferral.Report, error) {
	if err := ctx.Err(); err != nil {
		return deferral.Report{}, contextError(v, "", err)
	}
	rep, b, err := h.askStats(ctx, v)
	if err != nil {
		return deferral.Report{}, err
	}
	if rep.status != 200 {
		return deferral.Report{}, statusError(v, "stats", b, rep)
	}
	parse := parseStatsJSON
	if b.flavor == rustShim {
		parse = parseStatsDebug
	}
	report, err := parse(rep.body)
	if err == nil {
		err = h.checkSize(v, report)
	}
	if err != nil {
		return deferral.Report{}, badStats(v, b, err)
	}
	return report, nil
}

func (h *Handler) askStats(ctx context.Context, v *deferral.Volume) (reply, binding, error) {
	rep, b, err := h.call(ctx, v, func(b binding) ([]byte, error) { return h.statsRequest(ctx, v, b) })
	if err != nil || b.flavor != rustShim || rep.status == 200 || !h.forgetGuest(v, b.id) {
		return rep, b, err
	}
	// A container that was restarted in the same sandbox has the volume at
	// another path.
	return h.call(ctx, v, func(b binding) ([]byte, error) { return h.statsRequest(ctx, v, b) })
}

func (h *Handler) statsRequest(ctx context.Context, v *deferral.Volume, b binding) ([]byte, error) {
	if b.flavor == rustShim {
		guest, err := h.guestPath(ctx, v, b.id)
		if err != nil {
			return nil, err
		}
		return statsRequestRust(guest), nil
	}
	return statsRequestGo(v.Device.Path), nil
}

// statsRequestGo asks by the device. It is escaped twice, because the shim
// unescapes the value of the query once more than it should.
func statsRequestGo(device string) []byte {
	return []byte("GET " + statsPath + escape(escape(device)) + " HTTP/1.1\r\nHost: shim\r\n\r\n")
}

// statsRequestRust asks by the path in the guest, with the absolute form of the
// request's target: the shim parses it as a URL, which needs a host.
func statsRequestRust(guest string) []byte {
	return []byte("POST http://shim" + statsPath + escape(guest) + " HTTP/1.1\r\nHost: shim\r\nContent-Length: 0\r\n\r\n")
}

// escape escapes all that any unescaper could change, a space as %20 and a plus
// as %2B: so it does not matter which kind of unescaping the shim does.
func escape(s string) string {
	const hex = "0123456789ABCDEF"
	out := make([]byte, 0, len(s)+len(s)/2)
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9',
			c == '-', c == '_', c == '.', c == '~', c == '/':
			out = append(out, c)
		default:
			out = append(out, '%', hex[c>>4], hex[c&15])
		}
	}
	return string(out)
}

// badStats classes an answer that cannot be read or cannot be true.
func badStats(v *deferral.Volume, b binding, err error) error {
	kind, what := deferral.Malformed, "stats that cannot be read"
	if errors.Is(err, guest.ErrAbsurd) {
		kind, what = deferral.Absurd, "stats that cannot be true"
	}
	return deferral.Errorf(kind, "volume %s: Kata sandbox %s (%s) answered with %s: %w", v.Target, b.id, b.flavor, what, err)
}

func (h *Handler) checkSize(v *deferral.Volume, report deferral.Report) error {
	if h.cfg.DeviceSize == nil {
		return nil
	}
	size, known := h.cfg.DeviceSize(v)
	if !known {
		return nil
	}
	return guest.CheckSize(report, size)
}
