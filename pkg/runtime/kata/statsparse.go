package kata

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// statsJSON is the agent's answer as the Go runtime prints it: zero values are omitted, and
// a list can hold null. The keys of a condition are the same as ours.
type statsJSON struct {
	Usage []*struct {
		Available count `json:"available"`
		Total     count `json:"total"`
		Used      count `json:"used"`
		Unit      count `json:"unit"`
	} `json:"usage"`
	Condition *volume.Condition `json:"volume_condition"`
}

// count is a number of a guest: a whole one from 0 to the largest int64.
type count int64

// UnmarshalJSON accepts plain whole numbers only.
func (c *count) UnmarshalJSON(raw []byte) error {
	n, err := parseCount(string(raw))
	*c = count(n)
	return err
}

func parseCount(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case text == "" || text[0] == '+', errors.Is(err, strconv.ErrSyntax):
		return 0, fmt.Errorf("%q stands where a whole number should", sys.ClipTo(text, 32))
	case text[0] == '-':
		return 0, guest.Absurdf("the negative number %s", sys.ClipTo(text, 32))
	case err != nil:
		return 0, guest.Absurdf("%s, a number above %d", sys.ClipTo(text, 32), math.MaxInt64)
	}
	return n, nil
}

func parseStatsJSON(body []byte) (volume.Report, error) {
	var in statsJSON
	if err := json.Unmarshal(body, &in); errors.Is(err, guest.ErrAbsurd) {
		return volume.Report{}, err
	} else if err != nil {
		return volume.Report{}, fmt.Errorf("it is not the JSON of stats: %s", guest.Printable(err.Error(), guest.MaxErrorText))
	}
	usages := make([]volume.Usage, 0, len(in.Usage))
	for _, u := range in.Usage {
		if u != nil {
			usages = append(usages, volume.Usage{
				Available: int64(u.Available), Total: int64(u.Total), Used: int64(u.Used), Unit: guest.Unit(int64(u.Unit)),
			})
		}
	}
	return guest.Report(usages, in.Condition)
}

// parseStatsDebug parses the answer of runtime-rs, which is not JSON but Rust's debug text of
// two values.
func parseStatsDebug(body []byte) (volume.Report, error) {
	if len(body) > maxBody {
		return volume.Report{}, errTooMuch
	}
	if !utf8.Valid(body) {
		return volume.Report{}, errDebugText
	}
	p := debugParser{rest: string(body)}
	p.want("Usage", ":")
	list := p.value(0)
	p.want("Volume", "Condition", ":")
	said := p.value(0)
	switch {
	case p.failed || list.kind != listValue:
		return volume.Report{}, errDebugText
	case !p.atEnd():
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

// unwrap removes Some(...), Ok(...) and the like.
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

// debugUnit reads a unit: a name such as BYTES, or a number without a name.
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
