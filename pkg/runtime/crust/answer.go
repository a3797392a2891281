package crust

import (
	"errors"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
)

// checkReport checks a handler's answer to stats. It describes a filesystem that a workload
// can write to, and is trusted no more than the workload.
func checkReport(v *volume.Volume, id string, said *handlerv1.GetVolumeStatsResponse, sizes guest.Sizes) (volume.Report, error) {
	report, err := readReport(said)
	if err == nil {
		err = sizes.Check(v, report)
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

func checkSize(v *volume.Volume, id string, r volume.Range, size int64, sizes guest.Sizes) (int64, error) {
	if size <= 0 || size < r.Required || (r.Limit > 0 && size > r.Limit) {
		return 0, volume.Errorf(volume.Absurd, "volume %s: the handler of sandbox %s says that it has %d bytes now, "+
			"and was asked for %d to %d", v.Target, id, size, r.Required, r.Limit)
	}
	if device, known := sizes.Of(v); known && size > device {
		return 0, volume.Errorf(volume.Absurd, "volume %s: the handler of sandbox %s says that it has %d bytes now, "+
			"on a device of %d", v.Target, id, size, device)
	}
	return size, nil
}

func refusal(v *volume.Volume, id string, kind volume.Kind, verb, text string) error {
	for _, known := range []string{"volume " + v.ResolvedTarget + ": ", "sandbox " + id + ": "} { // our error says so itself
		text = strings.Replace(text, known, "", 1)
	}
	text = guest.Printable(oneLine(text), guest.MaxErrorText)
	if text == "" {
		text = "it gave no reason"
	}
	switch kind {
	case volume.NoSandbox:
		return volume.Errorf(kind, "volume %s: the sandbox %s does not have it any more: %s", v.Target, id, text)
	case volume.Unsupported:
		return volume.Errorf(kind, "volume %s: the handler of sandbox %s cannot do %s: %s", v.Target, id, verb, text)
	default:
		return volume.Errorf(kind, "volume %s: the handler of sandbox %s refused %s: %s", v.Target, id, verb, text)
	}
}
