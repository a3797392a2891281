package kata

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
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
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("%.200s (%v): %s", body, err, diff)
	}
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
	if err != nil || len(files) != len(want) {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".json")
		t.Run(name, func(t *testing.T) { checkOutcome(t, parseStatsJSON, string(raw), want[name]) })
	}
}

func TestStatsJSON(t *testing.T) {
	one := volume.Usage{Available: 1, Total: 2, Used: 1, Unit: volume.UnitBytes}
	for body, want := range map[string]outcome{
		`{"usage":[null,{"available":1,"total":2,"used":1,"unit":1},{"total":9,"unit":7}]}`: bytesAnd(nil, one),
		`{"usage":[{"available":1,"total":2,"used":1,"unit":1}],"new_field":[1,{}]}` + "\n": bytesAnd(nil, one),
		``:                                     malformed,
		`null`:                                 malformed,
		`[]`:                                   malformed,
		`{"usage":null}`:                       malformed,
		`{"usage":{}}`:                         malformed,
		`{"usage":"much"}`:                     malformed,
		`{"usage":[[]]}`:                       malformed,
		`{"volume_condition":{}} x`:            malformed,
		`{"volume_condition":{}}{}`:            malformed,
		`{"volume_condition":{"abnormal":1}}`:  malformed,
		`{"usage":[{"total":1.5,"unit":1}]}`:   malformed,
		`{"usage":[{"total":1e3,"unit":1}]}`:   malformed,
		`{"usage":[{"total":"1","unit":1}]}`:   malformed,
		`{"usage":[{"total":null,"unit":1}]}`:  malformed,
		`{"usage":[{"total":1,"unit":"BYTES"`:  malformed,
		`{"usage":[{"total":-1,"unit":1}]}`:    absurd,
		`{"usage":[{"total":-1}]}`:             absurd,
		`{"usage":[{"unit":1}]}`:               absurd,
		`{"usage":[{"used":1,"unit":2}]}`:      absurd,
		`{"usage":[{"available":1,"unit":1}]}`: absurd,
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
	report, err := parseStatsJSON([]byte(body))
	if err != nil {
		t.Fatal(err)
	}
	message := report.Condition.Message
	if len(message) > guest.MaxMessage || !utf8.ValidString(message) || strings.ContainsAny(message, "\x1b\n") || message == "" {
		t.Errorf("%d bytes: %q", len(message), sys.ClipTo(message, 64))
	}
}

const special = `special_fields: SpecialFields { unknown_fields: UnknownFields { fields: None }, cached_size: CachedSize { size: 0 } }`

func TestStatsDebugText(t *testing.T) {
	usage := func(unit string) string {
		return `VolumeUsage { available: 1, total: 2, used: 1, unit: ` + unit + `, ` + special + ` }`
	}
	list := func(usages ...string) string { return `Usage: [` + strings.Join(usages, ", ") + `] Volume Condition: ` }
	one := volume.Usage{Available: 1, Total: 2, Used: 1, Unit: volume.UnitBytes}
	two := volume.Usage{Available: 1, Total: 2, Used: 1, Unit: volume.UnitInodes}
	const okText = `VolumeCondition { abnormal: false, message: "OK", ` + special + ` }`
	for body, want := range map[string]outcome{
		list(usage("BYTES"), usage("INODES")) + okText:              bytesAnd(ok, one, two),
		list(usage("Ok(BYTES)"), usage("Ok(INODES)")) + okText:      bytesAnd(ok, one, two),
		list(usage("1"), usage("Err(7)")) + okText:                  bytesAnd(ok, one),
		list(usage("UNKNOWN")) + okText:                             bytesAnd(ok),
		list(usage("BYTES")) + `None`:                               bytesAnd(nil, one),
		list(usage("BYTES")) + `MessageField(None)`:                 bytesAnd(nil, one),
		list(usage("BYTES")) + `MessageField(Some(` + okText + `))`: bytesAnd(ok, one),
		list("Some("+usage("BYTES")+")") + okText:                   bytesAnd(ok, one),
		list() + `VolumeCondition { abnormal: true, message: "a\"b\\\u{e4}\u{1F600}\n", .. }`: bytesAnd(
			&volume.Condition{Abnormal: true, Message: "a\"b\\ä😀"}),
		"Usage: [\n    VolumeUsage {\n        available: 1,\n        total: 2,\n        used: 1,\n        unit: BYTES,\n    },\n]" +
			" Volume Condition: None": bytesAnd(nil, one),
		list(`VolumeUsage { available: 1, total: 2, used: 1, unit: BYTES, x: {1: Fixed32([3]), "k": (1, 2)} }`) + `None`: bytesAnd(nil, one),
		list(`VolumeUsage { available: 0, total: 0, used: 0, unit: INODES }`) + okText:                                   bytesAnd(ok),
		list(`VolumeUsage { available: -1, total: 2, used: 1, unit: BYTES }`) + okText:                                   absurd,
		list(`VolumeUsage { available: 3, total: 2, used: 1, unit: BYTES }`) + okText:                                    absurd,
		list(`VolumeUsage { available: 0, total: 18446744073709551615, used: 1, unit: BYTES }`) + okText:                 absurd,
		list(`VolumeUsage { available: 1.5, total: 2, used: 1, unit: BYTES }`) + okText:                                  malformed,
		list(`VolumeUsage { total: 2, used: 1, unit: BYTES }`) + okText:                                                  malformed,
		list(`VolumeUsage { available: 1, total: 2, used: 1 }`) + okText:                                                 malformed,
		list(`VolumeUsage { available: 1, available: 1, total: 2, used: 1, unit: BYTES }`) + okText:                      malformed,
		list(`Other { available: 1, total: 2, used: 1, unit: BYTES }`) + okText:                                          malformed,
		list(usage("BYTES")):                 malformed,
		list(usage("BYTES")) + okText + " x": malformed,
		list(usage("BYTES"))[:40]:            malformed,
		list() + `None`:                      malformed,
		list() + `VolumeCondition`:           malformed,
		list() + `VolumeCondition { abnormal: false, message: "\u{110000}" }`: malformed,
		list() + `VolumeCondition { abnormal: false, message: "\x" }`:         malformed,
		list() + `VolumeCondition { abnormal: false, message: "` + "\xff\" }": malformed,
		list() + `VolumeCondition { abnormal: "no", message: "" }`:            malformed,
		`{"usage":[]}`:                           malformed,
		``:                                       malformed,
		`Usage: ` + strings.Repeat("[", 10000):   malformed,
		`Usage: ` + strings.Repeat("Ok(", 10000): malformed,
		`Usage: 1 Volume Condition: None`:        malformed,
		`Usage: [-] Volume Condition: None`:      malformed,
	} {
		checkOutcome(t, parseStatsDebug, body, want)
	}
}

// sane is what no answer may break, whatever a guest sends.
func sane(t *testing.T, report volume.Report, err error) {
	if err != nil {
		return
	}
	if len(report.Usage) == 0 && report.Condition == nil {
		t.Fatal("an empty report")
	}
	for _, u := range report.Usage {
		if u.Available < 0 || u.Used < 0 || u.Total <= 0 || u.Available > u.Total || u.Used > u.Total {
			t.Fatalf("usage %+v", u)
		}
	}
	if c := report.Condition; c != nil && (len(c.Message) > guest.MaxMessage || !sys.IsText(c.Message)) {
		t.Fatalf("message %q", c.Message)
	}
}

func FuzzStatsJSON(f *testing.F) {
	files, err := filepath.Glob("testdata/stats/*.json")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		report, err := parseStatsJSON(body)
		sane(t, report, err)
	})
}

func FuzzStatsDebug(f *testing.F) {
	f.Add([]byte(`Usage: [VolumeUsage { available: 1, total: 2, used: 1, unit: Ok(BYTES), ` + special + ` }] ` +
		`Volume Condition: VolumeCondition { abnormal: false, message: "a\u{e4}\n", ` + special + ` }`))
	f.Add([]byte(`Usage: [] Volume Condition: MessageField(Some(VolumeCondition { abnormal: true, message: "", .. }))`))
	f.Add([]byte(`Usage: [{1: (2, "x")}] Volume Condition: None`))
	f.Fuzz(func(t *testing.T, body []byte) {
		report, err := parseStatsDebug(body)
		sane(t, report, err)
	})
}
