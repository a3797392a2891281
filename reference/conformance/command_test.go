package conformance

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
)

func TestUsage(t *testing.T) {
	for args, wanted := range map[string]string{
		"":                               "--runtime is missing",
		"--runtime sh --fs ntfs":         "none of [btrfs ext4 xfs]",
		"--runtime sh --only plain,nope": `--only "nope"`,
		"--runtime /no/such/program":     "/no/such/program",
		"--runtime sh more":              `does not take "more"`,
		"--runtime sh -o xml":            `"xml"`,
		"--runtime sh --timeout -1s":     "negative",
		"--nope":                         "--nope",
	} {
		var out, stderr bytes.Buffer
		code := runCommand(t.Context(), strings.Fields(args), &printer.Printer{Out: &out}, &stderr)
		if code != 2 || !strings.Contains(stderr.String(), wanted) || !strings.Contains(stderr.String(), "crust-conformance --help") {
			t.Errorf("%s: status %d, %s", args, code, stderr.String())
		}
	}
	var out, stderr bytes.Buffer
	if code := runCommand(t.Context(), []string{"--help"}, &printer.Printer{Out: &out}, &stderr); code != 0 || stderr.Len() > 0 {
		t.Errorf("--help: status %d, %s", code, stderr.String())
	}
	page, err := os.ReadFile("../../docs/runtime-authors.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"--runtime", "--runtime-arg", "--root", "--fs", "--dir", "--only", "--timeout", "--output"} {
		if !strings.Contains(out.String(), flag) || !strings.Contains(string(page), "`"+flag) {
			t.Errorf("%s is not in the help or not in docs/runtime-authors.md", flag)
		}
	}
}

func TestReportText(t *testing.T) {
	var out bytes.Buffer
	c := &command{out: &printer.Printer{Out: &out, Format: printer.FormatTable}}
	report := Report{Results: []Result{
		{Name: "mount-inside", Status: Pass, Section: "7", Demand: "it is mounted"},
		{Name: "sub-link", Status: Fail, Section: "9", Demand: "it is refused", Seen: "it was\x1b[31m not"},
		{Name: "socket-same", Status: Skip, Section: "13", Demand: "it is the same", Seen: "no socket"},
	}}
	for _, r := range report.Results {
		if err := c.printResult(r); err != nil {
			t.Fatal(err)
		}
	}
	err := c.printEnd(report)
	if err == nil || err.Error() != "the handler does not meet 1 of 3 demands" {
		t.Errorf("the end: %v", err)
	}
	want, err := os.ReadFile("testdata/report.txt")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out.String()); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	if c.printEnd(Report{Results: report.Results[:1]}) != nil {
		t.Error("a handler that meets all demands is an error")
	}
}
