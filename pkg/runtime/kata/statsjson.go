package kata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// statsJSON is how the Go runtime prints the agent's answer: zero values are
// left out, and a list can hold null.
type statsJSON struct {
	Usage []*struct {
		Available count `json:"available"`
		Total     count `json:"total"`
		Used      count `json:"used"`
		Unit      count `json:"unit"`
	} `json:"usage"`
	Condition *struct {
		Abnormal bool   `json:"abnormal"`
		Message  string `json:"message"`
	} `json:"volume_condition"`
}

// count is a number as a guest may give it: whole, and 0 to the largest int64.
type count int64

// UnmarshalJSON accepts plain whole numbers only.
func (c *count) UnmarshalJSON(raw []byte) error {
	n, err := parseCount(string(raw))
	*c = count(n)
	return err
}

func parseCount(text string) (int64, error) {
	if len(text) > 1 && text[0] == '-' && allDigits(text[1:]) {
		return 0, guest.Absurdf("the negative number %s", guest.Clip(text, 32))
	}
	if !allDigits(text) {
		return 0, fmt.Errorf("%q stands where a whole number should", guest.Clip(text, 32))
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, guest.Absurdf("%s, a number above %d", guest.Clip(text, 32), math.MaxInt64)
	}
	return n, nil
}

func allDigits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

// parseStatsJSON reads the answer of the Go runtime's shim.
func parseStatsJSON(body []byte) (volume.Report, error) {
	var in statsJSON
	if err := decodeStats(body, &in); err != nil {
		return volume.Report{}, err
	}
	if len(in.Usage) > guest.MaxUsages {
		return volume.Report{}, errors.New("it lists too many usages")
	}
	var out guest.Report
	for _, u := range in.Usage {
		if u == nil {
			continue
		}
		err := out.Usage(volume.Usage{
			Available: int64(u.Available), Total: int64(u.Total), Used: int64(u.Used), Unit: unitOf(int64(u.Unit)),
		})
		if err != nil {
			return volume.Report{}, err
		}
	}
	if in.Condition != nil {
		out.Condition(in.Condition.Abnormal, in.Condition.Message)
	}
	return out.Done()
}

// decodeStats reads exactly one JSON object.
func decodeStats(body []byte, into *statsJSON) error {
	dec := json.NewDecoder(bytes.NewReader(body))
	if err := dec.Decode(into); err != nil {
		if errors.Is(err, guest.ErrAbsurd) {
			return err
		}
		return fmt.Errorf("it is not the JSON of stats: %s", guest.Printable(err.Error(), guest.MaxErrorText))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more follows after the JSON of stats")
	}
	return nil
}

func unitOf(n int64) volume.Unit {
	switch n {
	case 1:
		return volume.UnitBytes
	case 2:
		return volume.UnitInodes
	default:
		return volume.UnitUnknown
	}
}
