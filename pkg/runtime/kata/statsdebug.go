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
	usage, condition, err := splitDebug(string(body))
	if err != nil {
		return volume.Report{}, err
	}
	var out guest.Report
	if err := debugUsages(&out, usage); err != nil {
		return volume.Report{}, err
	}
	if err := debugCondition(&out, condition); err != nil {
		return volume.Report{}, err
	}
	return out.Done()
}

func splitDebug(text string) (usage, condition value, err error) {
	p := debugParser{rest: text}
	if err := p.literal("Usage:"); err != nil {
		return value{}, value{}, err
	}
	if usage, err = p.value(0); err != nil {
		return value{}, value{}, err
	}
	if err := p.literal("Volume Condition:"); err != nil {
		return value{}, value{}, err
	}
	if condition, err = p.value(0); err != nil {
		return value{}, value{}, err
	}
	if p.next() != 0 {
		return value{}, value{}, errors.New("more follows after the debug text of stats")
	}
	return usage, condition, nil
}

// unwrap takes off Some(...), Ok(...) and the like.
func unwrap(v value) value {
	for v.kind == nameValue && len(v.items) == 1 && v.fields == nil {
		v = v.items[0]
	}
	return v
}

func debugUsages(out *guest.Report, list value) error {
	if list.kind != listValue {
		return errDebugText
	}
	if len(list.items) > guest.MaxUsages {
		return errors.New("it lists too many usages")
	}
	for _, item := range list.items {
		usage, err := debugUsage(unwrap(item))
		if err != nil {
			return err
		}
		if err := out.Usage(usage); err != nil {
			return err
		}
	}
	return nil
}

func debugUsage(v value) (volume.Usage, error) {
	var u volume.Usage
	if v.kind != nameValue || v.text != "VolumeUsage" || v.fields == nil {
		return u, errDebugText
	}
	for name, into := range map[string]*int64{"available": &u.Available, "total": &u.Total, "used": &u.Used} {
		field := v.fields[name]
		if field.kind != numberValue {
			return u, fmt.Errorf("%w: the number of %q is missing", errDebugText, name)
		}
		n, err := parseCount(field.text)
		if err != nil {
			return u, err
		}
		*into = n
	}
	unit, err := debugUnit(v.fields["unit"])
	u.Unit = unit
	return u, err
}

// debugUnit reads BYTES, Ok(BYTES), and a number of which the runtime does not
// know the name.
func debugUnit(v value) (volume.Unit, error) {
	v = unwrap(v)
	switch {
	case v.kind == numberValue:
		n, err := parseCount(v.text)
		return unitOf(n), err
	case v.kind != nameValue || v.text == "":
		return volume.UnitUnknown, fmt.Errorf("%w: the unit is missing", errDebugText)
	case v.text == "BYTES":
		return volume.UnitBytes, nil
	case v.text == "INODES":
		return volume.UnitInodes, nil
	}
	return volume.UnitUnknown, nil
}

func debugCondition(out *guest.Report, v value) error {
	v = unwrap(v)
	if v.kind != nameValue {
		return errDebugText
	}
	if v.text == "None" && v.fields == nil {
		return nil
	}
	abnormal, message := v.fields["abnormal"], v.fields["message"]
	if v.text != "VolumeCondition" || message.kind != stringValue ||
		abnormal.kind != nameValue || (abnormal.text != "true" && abnormal.text != "false") {
		return errDebugText
	}
	out.Condition(abnormal.text == "true", message.text)
	return nil
}
