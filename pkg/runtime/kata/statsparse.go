package kata

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
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

// runtime-rs answers not with JSON but with Rust's debug text of the usages and the condition.
const (
	debugRest = `special_fields: SpecialFields \{ unknown_fields: UnknownFields \{ fields: None \}, ` +
		`cached_size: CachedSize \{ size: \d+ \} \} \}`
	debugUsage = `VolumeUsage \{ available: (-?\d+), total: (-?\d+), used: (-?\d+), unit: (?:Ok\()?(\w+)\)?, ` + debugRest
)

var (
	debugUsages = regexp.MustCompile(debugUsage)
	debugStats  = regexp.MustCompile(`^Usage: \[((?:` + debugUsage + `(?:, )?)*)\] Volume Condition: ` +
		`VolumeCondition \{ abnormal: (true|false), message: "((?:[^"\\]|\\.)*)", ` + debugRest + `$`)
	debugUnits = map[string]volume.Unit{"BYTES": volume.UnitBytes, "INODES": volume.UnitInodes}
	// Escapes of what cannot be printed stay.
	debugUnescape = strings.NewReplacer(`\"`, `"`, `\\`, `\`)
)

func parseStatsDebug(body []byte) (volume.Report, error) {
	found := debugStats.FindStringSubmatch(string(body))
	if found == nil {
		return volume.Report{}, errors.New("it is not the debug text of stats")
	}
	var usages []volume.Usage
	for _, usage := range debugUsages.FindAllStringSubmatch(found[1], -1) {
		u := volume.Usage{Unit: debugUnits[usage[4]]}
		for i, into := range []*int64{&u.Available, &u.Total, &u.Used} {
			var err error
			if *into, err = parseCount(usage[i+1]); err != nil {
				return volume.Report{}, err
			}
		}
		usages = append(usages, u)
	}
	return guest.Report(usages, &volume.Condition{Abnormal: found[6] == "true", Message: debugUnescape.Replace(found[7])})
}
