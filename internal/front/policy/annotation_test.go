package policy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestParseAnnotation(t *testing.T) {
	many := strings.Repeat("a,", maxAskedNames-1) + "a"
	full := "data" + strings.Repeat(" ", MaxAnnotation-4)
	for value, want := range map[string]Asked{
		"":                {},
		"*":               {All: true},
		" * ":             {All: true},
		"data":            {Names: []string{"data"}},
		full:              {Names: []string{"data"}},
		"data, logs":      {Names: []string{"data", "logs"}},
		"data,data":       {Names: []string{"data", "data"}},
		"a-1,0":           {Names: []string{"a-1", "0"}},
		"x,none-of-these": {Names: []string{"x", "none-of-these"}},
	} {
		got, err := ParseAnnotation(value)
		diff := cmp.Diff(want, got)
		check.That(t, err == nil && diff == "", "%q: %v\n%s", value, err, diff)
		check.That(t, got.Nothing() == (value == "") && got.Asks("data") == (want.All || strings.Contains(value, "data")),
			"%q asks for %+v", value, got)
	}
	got, err := ParseAnnotation(many)
	check.That(t, err == nil && len(got.Names) == maxAskedNames, "%d names: %+v, %v", maxAskedNames, got, err)
	for _, value := range []string{
		" ", ",", "data,", "*,data", "data,*", "Data", "a/b", "a\nb", "-a", "a_b", "\x1b[2J", strings.Repeat("a", 64),
		many + ",a", full + " ", strings.Repeat("a,", MaxAnnotation), "data logs", "true",
	} {
		got, err := ParseAnnotation(value)
		if value == "true" { // a name like any other: the pod has no such volume
			check.Must(t, err)
			continue
		}
		check.Require(t, err != nil && volume.KindOf(err) == volume.Invalid && got.Nothing(), "%.40q: got %+v, %v", value, got, err)
		text := err.Error()
		check.That(t, len(text) <= 700 && !strings.ContainsAny(text, "\x1b\n") && strings.Contains(text, AnnotationKey),
			"%.40q: the error is %q", value, text)
	}
}

// annotatedPolicy has rules for those who ask before and behind others.
func annotatedPolicy() *Policy {
	return &Policy{Rules: []Rule{
		{Name: "never shared", AccessModes: []string{"MULTI_NODE_MULTI_WRITER"}},
		{Name: "asked kata", Drivers: []string{"lvm"}, RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true, Handler: "kata", Format: volume.FormatGuest},
		{Name: "no lvm asked", Drivers: []string{"lvm"}, Annotated: true},
		{Name: "lvm stays", Drivers: []string{"lvm"}},
		{Name: "asked ebs", Drivers: []string{"ebs"}, RuntimeHandlers: []string{"kata", "crust"}, Annotated: true, Defer: true, Handler: "kata"},
		{Name: "crust", RuntimeHandlers: []string{"crust"}, Defer: true, Handler: "crust"},
	}}
}

func TestDecideForPodsThatAsk(t *testing.T) {
	p := annotatedPolicy()
	check.Must(t, p.Validate([]string{"kata", "crust"}))
	wish := func(driver, handler string, more ...func(*Input)) Input {
		w := Input{Driver: driver, RuntimeHandler: handler, PodKnown: true, Annotated: true, AccessMode: "SINGLE_NODE_WRITER"}
		for _, change := range more {
			change(&w)
		}
		return w
	}
	word := func(value string) func(*Input) {
		return func(w *Input) { w.Context = map[string]string{ContextKey: value} }
	}
	silent := func(w *Input) { w.Annotated = false }
	for name, c := range map[string]struct {
		wish Input
		want Verdict
		says []string // of the refusal, where there is one
	}{
		"asked and allowed":              {wish("lvm", "kata"), Verdict{Defer: true, Rule: `rule "asked kata"`, Handler: "kata", Format: volume.FormatGuest}, nil},
		"not asked":                      {wish("lvm", "kata", silent), Verdict{Rule: `rule "lvm stays"`}, nil},
		"asked, another rule denies":     {wish("lvm", "runc"), Verdict{Rule: `rule "no lvm asked"`}, []string{`rule "no lvm asked"`, `"runc"`, "lvm"}},
		"asked in the default runtime":   {wish("ebs", ""), Verdict{Rule: byNoRule}, []string{"no rule", "annotated: true", "default runtime", "ebs"}},
		"asked, deferred without a word": {wish("ebs", "crust"), Verdict{Defer: true, Rule: `rule "crust"`, Handler: "crust", Format: volume.FormatHost}, nil},
		"asked, by another rule":         {wish("ebs", "kata"), Verdict{Defer: true, Rule: `rule "asked ebs"`, Handler: "kata", Format: volume.FormatHost}, nil},
		"a deny before": {wish("lvm", "kata", func(w *Input) { w.AccessMode = "MULTI_NODE_MULTI_WRITER" }),
			Verdict{Rule: `rule "never shared"`}, []string{`rule "never shared"`}},
		"the volume says no":  {wish("lvm", "kata", word("false")), Verdict{Rule: byContext}, []string{ContextKey, `"false"`}},
		"the volume says yes": {wish("lvm", "kata", word("true")), Verdict{Defer: true, Rule: byContext, Format: volume.FormatHost}, nil},
		"the request says yes": {wish("nfs", "runc", func(w *Input) { w.Requested = true }),
			Verdict{Defer: true, Rule: RuleRequested, Format: volume.FormatHost}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := p.Decide(c.wish)
			diff := cmp.Diff(c.want, got, noTrace)
			check.Require(t, diff == "" && (err != nil) == (c.says != nil), "%v\n%s", err, diff)
			if err == nil {
				return
			}
			check.That(t, volume.KindOf(err) == volume.Denied, "it is classed %s", volume.KindOf(err))
			check.Says(t, "the error", err.Error(), append(c.says, AnnotationKey)...)
		})
	}
	_, err := p.Decide(Input{Driver: "ebs", Annotated: true})
	check.That(t, volume.KindOf(err) == volume.Unsupported && strings.Contains(fmt.Sprint(err), `rule "crust"`), "without a pod: %v", err)
}

// TestInlineVolumesAttributesOnlyAsk: the pod's author writes them. They can have no
// more than the annotation can, and keep nothing on the host.
func TestInlineVolumesAttributesOnlyAsk(t *testing.T) {
	p := annotatedPolicy()
	for name, c := range map[string]struct {
		driver, handler, word string
		want                  Verdict
		says                  []string
	}{
		"true where no rule defers":      {"nfs", "kata", "true", Verdict{Rule: byNoRule}, []string{ContextKey, "annotated: true"}},
		"true where a rule denies":       {"lvm", "runc", "true", Verdict{Rule: `rule "no lvm asked"`}, []string{ContextKey, `rule "no lvm asked"`}},
		"true where a rule lets it ask":  {"lvm", "kata", "true", Verdict{Defer: true, Rule: `rule "asked kata"`, Handler: "kata", Format: volume.FormatGuest}, nil},
		"true where it is deferred":      {"ebs", "crust", "true", Verdict{Defer: true, Rule: `rule "crust"`, Handler: "crust", Format: volume.FormatHost}, nil},
		"false where it is deferred":     {"ebs", "crust", "false", Verdict{Defer: true, Rule: `rule "crust"`, Handler: "crust", Format: volume.FormatHost}, nil},
		"false where it is not deferred": {"lvm", "kata", "false", Verdict{Rule: `rule "lvm stays"`}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := p.Decide(Input{
				Driver: c.driver, RuntimeHandler: c.handler, PodKnown: true, Inline: true, AccessMode: "SINGLE_NODE_WRITER",
				Context: map[string]string{ContextKey: c.word},
			})
			diff := cmp.Diff(c.want, got, noTrace)
			check.Require(t, diff == "" && (err != nil) == (c.says != nil) && (err == nil || volume.KindOf(err) == volume.Denied),
				"%v\n%s", err, diff)
			for _, want := range c.says {
				check.That(t, strings.Contains(err.Error(), want), "%q does not say %q", err, want)
			}
		})
	}
	inline := Input{Driver: "ebs", Inline: true, Context: map[string]string{ContextKey: "false"}}
	_, err := p.Decide(inline)
	check.That(t, volume.KindOf(err) == volume.Unsupported && !strings.Contains(err.Error(), ContextKey),
		"the pod is not known, and its author is told to decide: %v", err)
}

// FuzzAnnotation: whatever a pod asks for, parsing ends, is bounded, and changes nothing about a volume but to have a
// rule for those who ask defer it, or to have it refused.
func FuzzAnnotation(f *testing.F) {
	f.Add("data,logs", "data", "lvm", "kata", "", uint8(0))
	f.Add("*", "x", "ebs", "crust", "true", uint8(3))
	f.Add("a,,b", "", "", "", "false", uint8(1))
	f.Fuzz(func(t *testing.T, value, volume, driver, handler, word string, bits uint8) {
		asked, err := ParseAnnotation(value)
		check.Require(t, err == nil || asked.Nothing() && len(err.Error()) <= 2000, "%+v with %v", asked, err)
		check.Require(t, len(asked.Names) <= maxAskedNames, "%d names", len(asked.Names))
		w := Input{Driver: driver, RuntimeHandler: handler, PodKnown: bits&1 == 0, Requested: bits&2 != 0, AccessMode: "SINGLE_NODE_WRITER"}
		if word != "" {
			w.Context = map[string]string{ContextKey: word}
		}
		p := annotatedPolicy()
		before, errBefore := p.Decide(w)
		w.Annotated = asked.Asks(volume)
		after, errAfter := p.Decide(w)
		switch {
		case before.Defer && errBefore == nil:
			check.That(t, cmp.Equal(after, before) && errAfter == nil, "deferred as %+v, and with an annotation %+v, %v", before, after, errAfter)
		case errAfter == nil && after.Defer:
			check.That(t, w.Annotated && allowedToAsk(p, after), "%q has %+v deferred", value, after)
		case w.Annotated && errAfter == nil:
			t.Errorf("asked for, and silently on the host: %+v", after)
		}
	})
}

// allowedToAsk tells whether one of the rules for those who ask gave the verdict.
func allowedToAsk(p *Policy, v Verdict) bool {
	for i := range p.Rules {
		rule := &p.Rules[i]
		if rule.label() == v.Rule && rule.Annotated && rule.Defer && rule.Handler == v.Handler {
			return true
		}
	}
	return false
}
