package kata

import (
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// parseStatsDebug reads the answer of runtime-rs, which is not JSON but Rust's
// debug text of two values.
func parseStatsDebug(body []byte) (volume.Report, error) {
	if len(body) > maxBody {
		return volume.Report{}, errTooMuch
	}
	p := debugParser{rest: string(body)}
	p.want("Usage:")
	list := p.value(0)
	p.want("Volume Condition:")
	said := p.value(0)
	switch {
	case p.failed || list.kind != listValue:
		return volume.Report{}, errDebugText
	case p.next() != 0:
		return volume.Report{}, errors.New("more follows after the debug text of stats")
	}
	usages := make([]volume.Usage, 0, len(list.items))
	for _, item := range list.items {
		usage, err := debugUsage(unwrap(item))
		if err != nil {
			return volume.Report{}, err
		}
		usages = append(usages, usage)
	}
	condition, err := debugCondition(unwrap(said))
	if err != nil {
		return volume.Report{}, err
	}
	return guest.Report(usages, condition)
}

// unwrap takes off Some(...), Ok(...) and the like.
func unwrap(v value) value {
	for v.kind == nameValue && len(v.items) == 1 && v.fields == nil {
		v = v.items[0]
	}
	return v
}

func debugUsage(v value) (u volume.Usage, err error) {
	if v.kind != nameValue || v.text != "VolumeUsage" || v.fields == nil {
		return u, errDebugText
	}
	for name, into := range map[string]*int64{"available": &u.Available, "total": &u.Total, "used": &u.Used} {
		field := v.fields[name]
		if field.kind != numberValue {
			return u, fmt.Errorf("%w: the number of %q is missing", errDebugText, name)
		}
		if *into, err = parseCount(field.text); err != nil {
			return u, err
		}
	}
	u.Unit, err = debugUnit(unwrap(v.fields["unit"]))
	return u, err
}

// debugUnit reads BYTES, Ok(BYTES), and a number of which the runtime does not
// know the name.
func debugUnit(v value) (volume.Unit, error) {
	switch {
	case v.kind == numberValue:
		n, err := parseCount(v.text)
		return guest.Unit(n), err
	case v.kind != nameValue || v.text == "":
		return volume.UnitUnknown, fmt.Errorf("%w: the unit is missing", errDebugText)
	case v.text == "BYTES":
		return volume.UnitBytes, nil
	case v.text == "INODES":
		return volume.UnitInodes, nil
	}
	return volume.UnitUnknown, nil
}

func debugCondition(v value) (*volume.Condition, error) {
	if v.kind == nameValue && v.text == "None" && v.fields == nil {
		return nil, nil
	}
	abnormal, message := v.fields["abnormal"], v.fields["message"]
	if v.kind != nameValue || v.text != "VolumeCondition" || message.kind != stringValue ||
		abnormal.kind != nameValue || (abnormal.text != "true" && abnormal.text != "false") {
		return nil, errDebugText
	}
	return &volume.Condition{Abnormal: abnormal.text == "true", Message: message.text}, nil
}
