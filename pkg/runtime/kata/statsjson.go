package kata

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// statsJSON is how the Go runtime prints the agent's answer: zero values are
// left out, and a list can hold null. A condition has the names of ours.
type statsJSON struct {
	Usage []*struct {
		Available count `json:"available"`
		Total     count `json:"total"`
		Used      count `json:"used"`
		Unit      count `json:"unit"`
	} `json:"usage"`
	Condition *volume.Condition `json:"volume_condition"`
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
