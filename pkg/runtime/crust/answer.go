package crust

import (
	"errors"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// report checks what a handler said of a volume. It speaks for a filesystem that a
// workload can write to, and is believed no more than that.
func (h *Handler) report(v *deferral.Volume, id string, said *handlerv1.GetVolumeStatsResponse) (deferral.Report, error) {
	report, err := readReport(said)
	if err == nil && h.cfg.DeviceSize != nil {
		if size, known := h.cfg.DeviceSize(v); known {
			err = guest.CheckSize(report, size)
		}
	}
	switch {
	case errors.Is(err, guest.ErrAbsurd):
		return deferral.Report{}, deferral.Errorf(deferral.Absurd, "volume %s: the handler of sandbox %s answered with "+
			"stats that cannot be true: %w", v.Target, id, err)
	case err != nil:
		return deferral.Report{}, malformed(v, id, err)
	}
	return report, nil
}

func malformed(v *deferral.Volume, id string, err error) error {
	return deferral.Errorf(deferral.Malformed, "volume %s: the handler of sandbox %s sent an answer that cannot be read: %s",
		v.Target, id, guest.Printable(err.Error(), guest.MaxErrorText))
}

func readReport(said *handlerv1.GetVolumeStatsResponse) (deferral.Report, error) {
	if len(said.GetUsage()) > guest.MaxUsages {
		return deferral.Report{}, errors.New("it lists too many usages")
	}
	var out guest.Report
	for _, u := range said.GetUsage() {
		usage := deferral.Usage{Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: unitOf(u.GetUnit())}
		if err := out.Usage(usage); err != nil {
			return deferral.Report{}, err
		}
	}
	if condition := said.GetVolumeCondition(); condition != nil {
		out.Condition(condition.GetAbnormal(), condition.GetMessage())
	}
	return out.Done()
}

func unitOf(u runtimev1.VolumeUsage_Unit) deferral.Unit {
	switch u {
	case runtimev1.VolumeUsage_BYTES:
		return deferral.UnitBytes
	case runtimev1.VolumeUsage_INODES:
		return deferral.UnitInodes
	default:
		return deferral.UnitUnknown
	}
}

// newSize checks the size that a filesystem is said to have now.
func (h *Handler) newSize(v *deferral.Volume, id string, r deferral.Range, size int64) (int64, error) {
	if size <= 0 || size < r.Required || (r.Limit > 0 && size > r.Limit) {
		return 0, deferral.Errorf(deferral.Absurd, "volume %s: the handler of sandbox %s says that it has %d bytes now, "+
			"and was asked for %d to %d", v.Target, id, size, r.Required, r.Limit)
	}
	if h.cfg.DeviceSize != nil {
		if device, known := h.cfg.DeviceSize(v); known && size > device {
			return 0, deferral.Errorf(deferral.Absurd, "volume %s: the handler of sandbox %s says that it has %d bytes now, "+
				"on a device of %d", v.Target, id, size, device)
		}
	}
	return size, nil
}

// refusal is an answer that is an error, with what the handler says to people.
func refusal(v *deferral.Volume, id string, kind deferral.Kind, verb, text string) error {
	text = guest.Printable(oneLine(text), guest.MaxErrorText)
	if text == "" {
		text = "it gave no reason"
	}
	switch kind {
	case deferral.NoSandbox:
		return deferral.Errorf(kind, "volume %s: the sandbox %s does not have it any more: %s", v.Target, id, text)
	case deferral.Unsupported:
		return deferral.Errorf(kind, "volume %s: the handler of sandbox %s cannot do %s: %s", v.Target, id, verb, text)
	default:
		return deferral.Errorf(kind, "volume %s: the handler of sandbox %s refused %s: %s", v.Target, id, verb, text)
	}
}
