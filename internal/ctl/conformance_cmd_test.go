package ctl

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/conformance"
)

func TestConformanceUsage(t *testing.T) {
	b := newBench(t)
	for args, wanted := range map[string]string{
		"conformance":                                "--runtime is missing",
		"conformance --runtime sh --fs ntfs":         "none of [btrfs ext4 xfs]",
		"conformance --runtime sh --only plain,nope": `--only "nope"`,
		"conformance --runtime /no/such/program":     "/no/such/program",
		"conformance --runtime sh more":              `does not take "more"`,
	} {
		if r := b.run(strings.Fields(args)...); r.code != ExitUsage || !strings.Contains(r.err, wanted) {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

func TestConformanceText(t *testing.T) {
	var out strings.Builder
	a := &app{world: World{Out: &out, Getenv: func(string) string { return "" }}, output: formatTable}
	report := conformance.Report{Results: []conformance.Result{
		{Name: "mount-inside", Status: conformance.Pass, Section: "7", Demand: "it is mounted"},
		{Name: "sub-link", Status: conformance.Fail, Section: "9", Demand: "it is refused", Seen: "it was\x1b[31m not"},
		{Name: "socket-same", Status: conformance.Skip, Section: "13", Demand: "it is the same", Seen: "no socket"},
	}}
	for _, r := range report.Results {
		if err := a.conformanceLine(r); err != nil {
			t.Fatal(err)
		}
	}
	err := a.conformanceEnd(report)
	if err == nil || err.Error() != "the handler does not meet 1 of 3 demands" {
		t.Errorf("the end: %v", err)
	}
	golden(t, "conformance.txt", out.String())
	if a.conformanceEnd(conformance.Report{Results: report.Results[:1]}) != nil {
		t.Error("a handler that meets all is an error")
	}
}
