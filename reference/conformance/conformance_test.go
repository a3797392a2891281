package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Every requirement is in the page, in the section that it names.
func TestRequirementsAreInThePage(t *testing.T) {
	raw := check.Value(os.ReadFile("../../docs/runtime-authors.md"))(t)
	for name, d := range requirements() {
		check.That(t, d.text != "" && strings.Contains(string(raw), "\n## "+d.section+". "), "%s: %+v", name, d)
	}
	for _, name := range RequirementNames() {
		check.That(t, len(name) <= 18, "%s: the name is longer than its column", name)
	}
}

func TestCheck(t *testing.T) {
	s := &suite{outcomes: make(map[string]Result), onResult: func(Result) {}}
	fine := func(*trial) {}
	all := &trial{ctx: t.Context()}
	s.check(all, "mount-inside", fine, "plain-container")
	s.check(all, "sub-bound", func(t *trial) { t.must(errors.New("wrong")) }, "mount-inside")
	s.check(all, "sub-path", fine, "sub-bound")
	s.check(all, "resize-online", func(t *trial) { t.must(fmt.Errorf("x: %w", unsupported{reason: "no"})) })
	ended, stop := context.WithCancel(t.Context())
	s.check(&trial{ctx: ended}, "life-free", func(t *trial) { stop(); t.must(ended.Err()) })
	s.check(all, "resize-far", fine, "resize-online")
	s.check(&trial{ctx: ended}, "mount-grown", func(*trial) { t.Error("tried, although what it needs may have been cut off") })
	cannot := "the handler says that it cannot: no"
	want := map[string][2]string{
		"mount-inside": {"PASS", ""}, "sub-bound": {"FAIL", "wrong"}, "sub-path": {"SKIP", "not tried, because sub-bound did not pass"},
		"resize-online": {"SKIP", cannot}, "resize-far": {"SKIP", cannot},
	}
	got := make(map[string][2]string)
	for name, r := range s.outcomes {
		got[name] = [2]string{string(r.Status), r.Seen}
	}
	check.Same(t, cmp.Diff(want, got), "-want +got")
	check.That(t, s.report.Count(Skip) == 3 && s.report.Results[1].Section == "6" && s.report.Results[1].Seen == "wrong", "%+v", s.report)
}

// TestExec: a probe that never began is started again, and one that said why it failed is not.
func TestExec(t *testing.T) {
	for says, want := range map[string]int{"read init-p: connection reset by peer": execTries, probeSays + "read-only": 1} {
		dir := t.TempDir()
		script := fmt.Sprintf("#!/bin/sh\necho >>%s/tries; echo '%s' >&2; exit 1\n", dir, says)
		check.Must(t, os.WriteFile(dir+"/runtime", []byte(script), 0o700)) //nolint:gosec // a program
		c := &container{n: &node{handler: &handler{program: dir + "/runtime", dir: dir}}}
		_, err := c.exec(t.Context(), "write", "/data/a")
		tries, _ := os.ReadFile(dir + "/tries")
		check.That(t, len(tries) == want && err != nil && strings.Contains(err.Error(), says), "%q: %d tries, %v", says, len(tries), err)
	}
}

func TestWantStatus(t *testing.T) {
	for _, c := range []struct {
		words string
		ended programResult
		want  int
		ok    bool
		skip  bool
	}{
		{"stats", programResult{code: 0}, 0, true, false},
		{"stats", programResult{code: 3, stderr: "gone"}, 3, true, false},
		{"stats", programResult{code: 3}, 3, false, false},
		{"stats", programResult{code: 1, stderr: "x"}, 3, false, false},
		{"stats", programResult{code: 4, stderr: "x"}, 0, false, false}, // it is not optional
		{"resize", programResult{code: 4, stderr: "x"}, 0, false, true},
		{"freeze", programResult{code: 4, stderr: "x"}, 2, false, true},
		{"", programResult{code: 4, stderr: "x"}, 2, false, false},
	} {
		err := wantStatus(c.ended, c.want, strings.Fields(c.words))
		check.That(t, (err == nil) == c.ok && errors.As(err, new(unsupported)) == c.skip, "%+v: %v", c, err)
	}
}

// whileStill passes over what changed meanwhile, and not over what is wrong.
func TestWhileStill(t *testing.T) {
	moving := 0
	see := func(context.Context) (int, error) { moving++; return moving / 3, nil }
	tries := 0
	err := whileStill(t.Context(), see, func(context.Context, int) error { tries++; return errors.New("wrong") })
	check.That(t, err != nil && tries >= 4, "%d tries: %v", tries, err)
	check.Must(t, whileStill(t.Context(), see, func(context.Context, int) error { return nil }))
}

// The probe in a container ends with whoever holds its standard input.
func TestSleepEndsWithItsLease(t *testing.T) {
	in, lease, err := os.Pipe()
	check.Must(t, err)
	defer func() { _ = in.Close() }()
	done := make(chan int)
	go func() { done <- Probe([]string{"sleep"}, in, &bytes.Buffer{}, &bytes.Buffer{}) }()
	check.Must(t, lease.Close())
	check.Equal(t, <-done, 0, "exit code")
}

func TestUsage(t *testing.T) {
	for args, wanted := range map[string]string{
		"":                               "--runtime is missing",
		"--runtime sh --fs ntfs":         "none of [btrfs ext4 xfs]",
		"--runtime sh --only plain,nope": `--only "nope"`,
		"--runtime /no/such/program":     "/no/such/program",
		"--runtime sh more":              `does not take "more"`,
		"--runtime sh -o xml":            `"xml"`,
		"--nope":                         "--nope",
	} {
		var out, stderr bytes.Buffer
		code := runCommand(t.Context(), strings.Fields(args), &printer.Printer{Out: &out}, &stderr)
		check.That(t, code == 2 && strings.Contains(stderr.String(), wanted) && strings.Contains(stderr.String(), "crust-conformance --help"),
			"%s: status %d, %s", args, code, stderr.String())
	}
	var out, stderr bytes.Buffer
	code := runCommand(t.Context(), []string{"--help"}, &printer.Printer{Out: &out}, &stderr)
	check.That(t, code == 0 && stderr.Len() == 0, "--help: status %d, %s", code, stderr.String())
	check.Says(t, "--help", out.String(), "--runtime", "--root", "--fs", "--dir", "--only", "--output")
}

func TestReportText(t *testing.T) {
	var out bytes.Buffer
	report := Report{Results: []Result{
		{Name: "mount-inside", Status: Pass, Section: "7", Demand: "it is mounted"},
		{Name: "sub-link", Status: Fail, Section: "9", Demand: "it is refused", Seen: "it was\x1b[31m not"},
		{Name: "socket-same", Status: Skip, Section: "13", Demand: "it is the same", Seen: "no socket"},
	}}
	printed := func(of Report) error {
		return Print(&printer.Printer{Out: &out, Format: printer.FormatTable}, "the handler", func(onResult func(Result)) (Report, error) {
			for _, r := range of.Results {
				onResult(r)
			}
			return of, nil
		})
	}
	err := printed(report)
	check.That(t, err != nil && err.Error() == "the handler does not meet 1 of 3 demands", "the end: %v", err)
	want := check.Value(os.ReadFile("testdata/report.txt"))(t)
	check.Same(t, cmp.Diff(string(want), out.String()), "report (-want +got)")
	check.That(t, printed(Report{Results: report.Results[:1]}) == nil, "a handler that meets all demands is an error")
}
