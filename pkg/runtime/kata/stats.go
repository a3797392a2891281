package kata

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const statsPath = "/direct-volume/stats?path="

// Stats asks the volume's live sandbox for its usage.
func (h *Handler) Stats(ctx context.Context, v *volume.Volume) (volume.Report, error) {
	if err := ctx.Err(); err != nil {
		return volume.Report{}, guest.ContextError(v, "", err)
	}
	c, b, err := h.client.connect(ctx, v)
	if err != nil {
		return volume.Report{}, h.denied(ctx, v, b, err)
	}
	var report volume.Report
	unknown := false
	if b.flavor == rustShim {
		search := &guestSearch{h: h, v: v, shim: b, conn: c}
		report, err = search.stats(ctx)
		unknown = search.unknown
		if search.conn != nil {
			search.conn.close()
		}
	} else {
		// The shim unescapes the value of the query once too often.
		request := "GET " + statsPath + escape(escape(v.Device.Path)) + " HTTP/1.1\r\nHost: shim\r\n\r\n"
		report, err = h.askStats(ctx, v, b, c, []byte(request))
	}
	switch {
	case unknown: // the sandbox has not said whether it has the volume
		return volume.Report{}, err
	case err != nil:
		return volume.Report{}, h.denied(ctx, v, b, err)
	}
	h.store.Bindings.Prove(v.Key, b.id, true)
	report.Sandbox, report.GroupIgnored = b.id, h.groupIgnored(v, b)
	// The agent's condition is "OK" for every filesystem. If a later agent reports an abnormal one, it is believed.
	if said := report.Condition; said == nil || !said.Abnormal {
		report.Condition = h.cfg.Disks.Condition(v)
	}
	return report, nil
}

// errNotMounted marks a live sandbox that does not have the volume: between two containers
// the disk is unplugged, and sometimes Kata never attached it.
var errNotMounted = errors.New("does not have it mounted now")

// denied records that a sandbox does not have the volume, and adds what the cause may be.
func (h *Handler) denied(ctx context.Context, v *volume.Volume, b shim, err error) error {
	if volume.KindOf(err) != volume.NoSandbox || b.id == "" {
		return err
	}
	h.store.Bindings.Prove(v.Key, b.id, false)
	if !errors.Is(err, errNotMounted) || h.sandboxes == nil {
		return err
	}
	paths, lookErr := h.sandboxes.Destinations(ctx, b.id, v.ResolvedTarget)
	switch {
	case lookErr != nil:
		return err
	case len(paths) == 0:
		return volume.Errorf(volume.NoSandbox, "%w. No container of the pod mounts the volume now, or only by subPath, "+
			"which Kata cannot serve", err)
	}
	return volume.Errorf(volume.NoSandbox, "%w. If this does not pass: a container has %s, and Kata did not put the volume "+
		"there; disable_block_device_use may be true in its configuration, or the disk could not be attached (see Kata's log)",
		err, strings.Join(paths, ", "))
}

// groupIgnored reports whether the sandbox ignores the volume's group: runtime-rs does not
// pass it to the guest. It logs that once per sandbox.
func (h *Handler) groupIgnored(v *volume.Volume, b shim) bool {
	if b.flavor != rustShim || v.Group == "" || v.Adopted || !h.cfg.Disks.LacksGroup(v) {
		return false
	}
	if _, tracked := h.store.Bindings.Get(v.Key); !tracked || !h.guests.firstGroupless(v.Key, b.id) {
		return true
	}
	pod := v.PodUID
	if v.Origin != nil && v.Origin.PodName != "" {
		pod = v.Origin.PodNamespace + "/" + v.Origin.PodName
	}
	h.log.Warn(runtime.GroupIgnored, zap.String("pod", pod), zap.String("target", v.Target), zap.String("group", v.Group),
		zap.String("sandbox", b.id))
	return true
}

// askStats sends one request. If its error is about the numbers, it returns those as well.
func (h *Handler) askStats(ctx context.Context, v *volume.Volume, b shim, c *conn, request []byte) (volume.Report, error) {
	rep, err := c.ask(ctx, v, b.id, request)
	if err != nil {
		return volume.Report{}, err
	}
	if rep.status != 200 {
		return volume.Report{}, statusError(v, "stats", b, rep)
	}
	parse := parseStatsJSON
	if b.flavor == rustShim {
		parse = parseStatsDebug
	}
	report, err := parse(rep.body)
	if err != nil {
		return volume.Report{}, badStats(v, b, err)
	}
	if err := guest.CheckSize(v, report); err != nil {
		return report, badStats(v, b, err)
	}
	return report, nil
}

// escape escapes everything that any unescaper could change, a space as %20 and a plus as
// %2B, so that it does not matter how the shim unescapes.
func escape(s string) string { return fromQuery.Replace(url.QueryEscape(s)) }

var fromQuery = strings.NewReplacer("+", "%20", "%2F", "/")

func badStats(v *volume.Volume, b shim, err error) error {
	kind, what := volume.Malformed, "stats that cannot be read"
	if errors.Is(err, guest.ErrAbsurd) {
		kind, what = volume.Absurd, "stats that cannot be true"
	}
	return volume.Errorf(kind, "volume %s: Kata sandbox %s (%s) answered with %s: %w", v.Target, b.id, b.flavor, what, err)
}

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
