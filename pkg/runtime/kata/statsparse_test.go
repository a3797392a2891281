package kata

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// outcome is what a body is expected to be read as.
type outcome struct {
	report volume.Report
	kind   volume.Kind // Internal for a report
}

func bytesAnd(c *volume.Condition, u ...volume.Usage) outcome {
	return outcome{report: volume.Report{Usage: u, Condition: c}}
}

var (
	ok        = &volume.Condition{Message: "OK"}
	malformed = outcome{kind: volume.Malformed}
	absurd    = outcome{kind: volume.Absurd}
)

func checkOutcome(t *testing.T, parse func([]byte) (volume.Report, error), body string, want outcome) {
	t.Helper()
	report, err := parse([]byte(body))
	got := outcome{report: report}
	if err != nil {
		got = outcome{kind: volume.Malformed}
		if errors.Is(err, guest.ErrAbsurd) {
			got.kind = volume.Absurd
		}
	}
	check.Same(t, cmp.Diff(want, got, cmp.AllowUnexported(outcome{})), "%.200s (%v)", body, err)
}

// The files hold answers that Kata's own types encoded.
func TestStatsOfKatasOwnEncoder(t *testing.T) {
	want := map[string]outcome{
		"normal": bytesAnd(ok,
			volume.Usage{Available: 9663676416, Total: 10737418240, Used: 1073741824, Unit: volume.UnitBytes},
			volume.Usage{Available: 655349, Total: 655360, Used: 11, Unit: volume.UnitInodes}),
		"full-volume-available-omitted": bytesAnd(ok,
			volume.Usage{Total: 4096, Used: 4096, Unit: volume.UnitBytes},
			volume.Usage{Total: 10, Used: 10, Unit: volume.UnitInodes}),
		"no-inodes-fs-all-zero": bytesAnd(ok, volume.Usage{Available: 4096, Total: 4096, Unit: volume.UnitBytes}),
		"abnormal":              bytesAnd(&volume.Condition{Abnormal: true, Message: "I/O error"}),
		"condition-zero":        bytesAnd(&volume.Condition{}),
		"html-escaped-message":  bytesAnd(&volume.Condition{Abnormal: true, Message: `a<b>&"c"`}),
		"empty":                 malformed,
		"empty-usage-element":   malformed,
		"nil-usage-element":     malformed,
		"unit-out-of-enum":      malformed,
		"unit-unknown-omitted":  malformed,
		"uint64-max":            absurd,
	}
	files, err := filepath.Glob("testdata/stats/*.json")
	check.Require(t, err == nil && len(files) == len(want), "%d files, %v", len(files), err)
	for _, file := range files {
		raw := check.Value(os.ReadFile(file))(t)
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		t.Run(name, func(t *testing.T) { checkOutcome(t, parseStatsJSON, string(raw), want[name]) })
	}
}

func TestStatsJSON(t *testing.T) {
	one := volume.Usage{Available: 1, Total: 2, Used: 1, Unit: volume.UnitBytes}
	for body, want := range map[string]outcome{
		`{"usage":[null,{"available":1,"total":2,"used":1,"unit":1},{"total":9,"unit":7}]}`: bytesAnd(nil, one),
		`{"usage":[{"available":1,"total":2,"used":1,"unit":1}],"new_field":[1,{}]}` + "\n": bytesAnd(nil, one),
		``:                                                        malformed,
		`null`:                                                    malformed,
		`{"usage":null}`:                                          malformed,
		`{"volume_condition":{}} x`:                               malformed,
		`{"volume_condition":{"abnormal":1}}`:                     malformed,
		`{"usage":[{"total":1.5,"unit":1}]}`:                      malformed,
		`{"usage":[{"total":"1","unit":1}]}`:                      malformed,
		`{"usage":[{"total":null,"unit":1}]}`:                     malformed,
		`{"usage":[{"total":1,"unit":"BYTES"`:                     malformed,
		`{"usage":[{"total":-1,"unit":1}]}`:                       absurd,
		`{"usage":[{"total":-1}]}`:                                absurd,
		`{"usage":[{"unit":1}]}`:                                  absurd,
		`{"usage":[{"used":1,"unit":2}]}`:                         absurd,
		`{"usage":[{"available":1,"unit":1}]}`:                    absurd,
		`{"usage":[{"total":9223372036854775808,"unit":1}]}`:      absurd,
		`{"usage":[{"total":1,"unit":1},{"total":2,"unit":1}]}`:   malformed,
		`{"usage":[` + strings.Repeat(`null,`, 99) + `null]}`:     malformed,
		strings.Repeat(`{"usage":[`, 20000):                       malformed,
		`{"usage":[{"total":1,"unit":1}],"usage":[{"total":-1}]}`: absurd,
	} {
		checkOutcome(t, parseStatsJSON, body, want)
	}
}

func TestConditionIsBoundedAndPrintable(t *testing.T) {
	body := `{"volume_condition":{"message":"` + strings.Repeat(`ä\u001b\n`, 2000) + `"}}`
	message := check.Value(parseStatsJSON([]byte(body)))(t).Condition.Message
	check.That(t, len(message) <= guest.MaxMessage && utf8.ValidString(message) && !strings.ContainsAny(message, "\x1b\n") && message != "",
		"%d bytes: %q", len(message), sys.ClipTo(message, 64))
}

const special = `special_fields: SpecialFields { unknown_fields: UnknownFields { fields: None }, cached_size: CachedSize { size: 0 } }`

func TestStatsDebugText(t *testing.T) {
	usage := func(unit string) string {
		return `VolumeUsage { available: 1, total: 2, used: 1, unit: ` + unit + `, ` + special + ` }`
	}
	condition := func(abnormal, message string) string {
		return `VolumeCondition { abnormal: ` + abnormal + `, message: ` + message + `, ` + special + ` }`
	}
	list := func(usages ...string) string { return `Usage: [` + strings.Join(usages, ", ") + `] Volume Condition: ` }
	with := func(before, after string) string {
		return list(strings.Replace(usage("BYTES"), before, after, 1)) + condition("false", `"OK"`)
	}
	one := volume.Usage{Available: 1, Total: 2, Used: 1, Unit: volume.UnitBytes}
	two := volume.Usage{Available: 1, Total: 2, Used: 1, Unit: volume.UnitInodes}
	okText := condition("false", `"OK"`)
	for body, want := range map[string]outcome{
		list(usage("BYTES"), usage("INODES")) + okText:         bytesAnd(ok, one, two),
		list(usage("Ok(BYTES)"), usage("Ok(INODES)")) + okText: bytesAnd(ok, one, two),
		list(usage("UNKNOWN"), usage("7")) + okText:            bytesAnd(ok),
		list() + condition("true", `"a\"b\\ä😀\n\u{1b}"`):       bytesAnd(&volume.Condition{Abnormal: true, Message: `a"b\ä😀\n\u{1b}`}),
		list() + condition("false", "\"\xff\n\x1b[m\""):        bytesAnd(&volume.Condition{Message: "? ?[m"}),
		list() + condition("false", `"`+usage("BYTES")+`"`):    bytesAnd(&volume.Condition{Message: usage("BYTES")}),

		with("available: 1, total: 2, used: 1, unit: BYTES", "available: 0, total: 0, used: 0, unit: INODES"): bytesAnd(ok),
		with("available: 1", "available: -1"):           absurd,
		with("available: 1", "available: 3"):            absurd,
		with("total: 2", "total: 18446744073709551615"): absurd,
		with("available: 1", "available: 1.5"):          malformed,
		with("available: 1, ", ""):                      malformed,
		with(", unit: BYTES", ""):                       malformed,
		with("available", "available: 1, available"):    malformed,
		with("VolumeUsage", "Other"):                    malformed,
		with("None", `Some({1: [3], "k": (1, 2)})`):     malformed,
		list(usage("BYTES")):                            malformed,
		list(usage("BYTES")) + okText + " x":            malformed,
		list(usage("BYTES"), usage("BYTES")) + okText:   malformed,
		list() + `None`:                                 malformed,
		list() + condition("no", `""`):                  malformed,
		list() + condition("true", `"\"`):               malformed,
		``:                                              malformed,
		`Usage: ` + strings.Repeat("[", 10000):          malformed,
		`Usage: [-] Volume Condition: ` + okText:        malformed,
	} {
		checkOutcome(t, parseStatsDebug, body, want)
	}
}

// sane is what no answer may break, whatever a guest sends.
func sane(t *testing.T, report volume.Report, err error) {
	if err != nil {
		return
	}
	check.Require(t, len(report.Usage) != 0 || report.Condition != nil, "an empty report")
	for _, u := range report.Usage {
		check.Require(t, u.Available >= 0 && u.Used >= 0 && u.Total > 0 && u.Available <= u.Total && u.Used <= u.Total, "usage %+v", u)
	}
	c := report.Condition
	check.Require(t, c == nil || len(c.Message) <= guest.MaxMessage && sys.IsText(c.Message), "condition %+v", c)
}

func FuzzStatsJSON(f *testing.F) {
	files := check.Value(filepath.Glob("testdata/stats/*.json"))(f)
	for _, file := range files {
		f.Add(check.Value(os.ReadFile(file))(f))
	}
	f.Add([]byte(`{"usage": [{"available": 1, "total": 2, "used": 1, "unit": 1}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		report, err := parseStatsJSON(body)
		sane(t, report, err)
	})
}

func FuzzStatsDebug(f *testing.F) {
	f.Add([]byte(`Usage: [VolumeUsage { available: 1, total: 2, used: 1, unit: Ok(BYTES), ` + special + ` }] ` +
		`Volume Condition: VolumeCondition { abnormal: false, message: "a\u{e4}\n", ` + special + ` }`))
	f.Add([]byte(`Usage: [] Volume Condition: VolumeCondition { abnormal: true, message: "\"\\", ` + special + ` }`))
	f.Fuzz(func(t *testing.T, body []byte) {
		report, err := parseStatsDebug(body)
		sane(t, report, err)
	})
}
