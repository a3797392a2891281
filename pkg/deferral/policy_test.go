package deferral

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func examplePolicy() *Policy {
	return &Policy{
		Format: FormatNever,
		Rules: []Rule{
			{Name: "not shared", AccessModes: []string{"MULTI_NODE_MULTI_WRITER"}},
			{Name: "xfs of lvm", Drivers: []string{"lvm"}, Filesystems: []string{"xfs"}, Defer: true, Format: FormatGuest},
			{Name: "kata", Drivers: []string{"*.csi.example.com"}, RuntimeHandlers: []string{"kata", "kata-qemu"}, Defer: true, Handler: "kata"},
			{Name: "ebs", Drivers: []string{"ebs.csi.aws.com"}, Defer: true, Format: FormatHost},
		},
	}
}

func TestDecide(t *testing.T) {
	key := func(v string) map[string]string { return map[string]string{ContextKey: v, "other": "x"} }
	for name, c := range map[string]struct {
		wish Wish
		want Verdict
	}{
		"nothing matches": {Wish{Driver: "nfs"}, Verdict{Rule: "no rule"}},
		"first match wins": {Wish{Driver: "ebs.csi.aws.com", AccessMode: "MULTI_NODE_MULTI_WRITER"},
			Verdict{Rule: `rule "not shared"`}},
		"own format":      {Wish{Driver: "lvm", FSType: "xfs"}, Verdict{Defer: true, Rule: `rule "xfs of lvm"`, Format: FormatGuest}},
		"other fs":        {Wish{Driver: "lvm", FSType: "ext4"}, Verdict{Rule: "no rule"}},
		"pattern":         {Wish{Driver: "a.csi.example.com", RuntimeHandler: "kata", RuntimeHandlerKnown: true}, Verdict{Defer: true, Rule: `rule "kata"`, Handler: "kata", Format: FormatNever}},
		"pattern, whole":  {Wish{Driver: "a.csi.example.com.evil", RuntimeHandler: "kata", RuntimeHandlerKnown: true}, Verdict{Rule: "no rule"}},
		"default runtime": {Wish{Driver: "a.csi.example.com", RuntimeHandlerKnown: true}, Verdict{Rule: "no rule"}},
		"request before all": {Wish{Driver: "ebs.csi.aws.com", AccessMode: "MULTI_NODE_MULTI_WRITER", Requested: true, Context: key("false")},
			Verdict{Defer: true, Rule: "defer_fs_ops of the request", Format: FormatHost}},
		"request, no rule":        {Wish{Driver: "nfs", Requested: true}, Verdict{Defer: true, Rule: "defer_fs_ops of the request", Format: FormatNever}},
		"context before rules":    {Wish{Driver: "ebs.csi.aws.com", Context: key("false")}, Verdict{Rule: "volume context"}},
		"context asks":            {Wish{Driver: "lvm", FSType: "xfs", Context: key("true")}, Verdict{Defer: true, Rule: "volume context", Format: FormatGuest}},
		"context of others":       {Wish{Driver: "nfs", Context: map[string]string{"x": "true"}}, Verdict{Rule: "no rule"}},
		"handler does not matter": {Wish{Driver: "b.csi.example.com", Context: key("false")}, Verdict{Rule: "volume context"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := examplePolicy().Decide(c.wish)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAnEmptyPolicyDefersOnlyWhatIsAskedFor(t *testing.T) {
	var p Policy
	if got, err := p.Decide(Wish{Driver: "lvm"}); err != nil || got.Defer {
		t.Errorf("got %+v, %v", got, err)
	}
	want := Verdict{Defer: true, Rule: byRequest, Format: FormatHost}
	if got, err := p.Decide(Wish{Driver: "lvm", Requested: true}); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestDecideNeverGuesses(t *testing.T) {
	for name, c := range map[string]struct {
		wish Wish
		kind Kind
		says []string
	}{
		"rule by runtime handler": {Wish{Driver: "a.csi.example.com"}, Unsupported, []string{`rule "kata"`, "runtimeHandlers", ContextKey}},
		"asked, and how is open": {Wish{Driver: "a.csi.example.com", Requested: true}, Unsupported,
			[]string{`rule "kata"`, "defer_fs_ops of the request", "runtimeHandlers"}},
		"odd value":              {Wish{Driver: "nfs", Context: map[string]string{ContextKey: "True"}}, Invalid, []string{ContextKey, `"True"`, `"false"`}},
		"odd value in a request": {Wish{Driver: "nfs", Requested: true, Context: map[string]string{ContextKey: ""}}, Invalid, []string{ContextKey}},
		"long value":             {Wish{Context: map[string]string{ContextKey: strings.Repeat("x", 1<<16)}}, Invalid, []string{"..."}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := examplePolicy().Decide(c.wish)
			if err == nil || KindOf(err) != c.kind || got.Defer || got.Handler != "" {
				t.Fatalf("got %+v, %v (%s)", got, err, KindOf(err))
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if len(err.Error()) > 1000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
		})
	}
}

// TestAskedVolumesNeedNoHandlerWhereItChangesNothing: the volume is deferred in
// the same way, whichever rule matches.
func TestAskedVolumesNeedNoHandlerWhereItChangesNothing(t *testing.T) {
	p := Policy{Rules: []Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true}}}
	got, err := p.Decide(Wish{Driver: "lvm", Requested: true})
	if want := (Verdict{Defer: true, Rule: byRequest, Format: FormatHost}); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestValidatePolicy(t *testing.T) {
	if err := examplePolicy().Validate([]string{"kata"}); err != nil {
		t.Error(err)
	}
	rule := func(change func(*Rule)) []Rule {
		r := Rule{Name: "a", Defer: true}
		change(&r)
		return []Rule{r}
	}
	two := func(a, b Rule) []Rule { a.Name, b.Name = "first", "second"; return []Rule{a, b} }
	for want, rules := range map[string][]Rule{
		`policy.rules[0] ("a").handler: "runc"`: rule(func(r *Rule) { r.Handler = "runc" }),
		`policy.rules[0] ("a").format: "often"`: rule(func(r *Rule) { r.Format = "often" }),
		`.drivers[1]: "a/b"`:                    rule(func(r *Rule) { r.Drivers = []string{"x", "a/b"} }),
		`.drivers[0]: "[ab]"`:                   rule(func(r *Rule) { r.Drivers = []string{"[ab]"} }),
		`.drivers[0]: ""`:                       rule(func(r *Rule) { r.Drivers = []string{""} }),
		`.filesystems[0]: "EXT4"`:               rule(func(r *Rule) { r.Filesystems = []string{"EXT4"} }),
		`.runtimeHandlers[0]: "Kata"`:           rule(func(r *Rule) { r.RuntimeHandlers = []string{"Kata"} }),
		`.accessModes[0]: "ReadWriteOnce"`:      rule(func(r *Rule) { r.AccessModes = []string{"ReadWriteOnce"} }),
		"have no effect":                        {{Name: "a", Format: FormatGuest}},
		`policy.rules[1] ("b").name: policy.rules[0] ("b")`: {
			{Name: "b", Drivers: []string{"x"}}, {Name: "b", Drivers: []string{"y"}}},
		`("second"): it can never match, because policy.rules[0] ("first")`:        two(Rule{}, Rule{Drivers: []string{"x"}}),
		`policy.rules[0] ("a").annotated: anybody`:                                 {{Name: "a", Annotated: true, Defer: true}},
		`("second"): it can never match, because policy.rules[0] ("first") stands`: two(Rule{}, Rule{Annotated: true, Defer: true, RuntimeHandlers: []string{"k"}}),
		`it can never match`: two(Rule{Drivers: []string{"*.com"}, Filesystems: []string{"xfs", "ext4"}},
			Rule{Drivers: []string{"a.com", "*b*.com"}, Filesystems: []string{"ext4"}, AccessModes: []string{"SINGLE_NODE_WRITER"}}),
	} {
		err := (&Policy{Rules: rules}).Validate([]string{"kata"})
		if err == nil || KindOf(err) != Invalid || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v", want, err)
		}
	}
	for _, name := range []string{"", " x", "a\nb", strings.Repeat("x", 64), "\x1b[2J"} {
		err := (&Policy{Rules: []Rule{{Name: name}}}).Validate(nil)
		if err == nil || !strings.Contains(err.Error(), "policy.rules[0]") || strings.ContainsAny(err.Error(), "\x1b\n") {
			t.Errorf("%q: got %v", name, err)
		}
	}
	if err := (&Policy{Format: "x"}).Validate(nil); err == nil || !strings.Contains(err.Error(), "policy.format") {
		t.Errorf("got %v", err)
	}
	if err := (&Policy{Rules: make([]Rule, maxRules+1)}).Validate(nil); err == nil {
		t.Error("any number of rules is taken")
	}
}

func TestAllProblemsOfAPolicyAreToldAtOnce(t *testing.T) {
	p := Policy{Format: "x", Rules: []Rule{{Name: "a", Drivers: []string{"/"}}, {Name: "b", Handler: "c", Defer: true, Drivers: []string{"d"}}}}
	err := p.Validate(nil)
	for _, want := range []string{"policy.format", "rules[0]", "rules[1]"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

func TestRulesThatOnlyOverlapMayStandTogether(t *testing.T) {
	for name, rules := range map[string][]Rule{
		"special first":   {{Name: "a", Drivers: []string{"x.com"}}, {Name: "b", Drivers: []string{"*.com"}}, {Name: "c"}},
		"one of two":      {{Name: "a", Drivers: []string{"x"}}, {Name: "b", Drivers: []string{"x", "y"}}},
		"handlers":        {{Name: "a", RuntimeHandlers: []string{"kata"}}, {Name: "b"}},
		"annotated first": {{Name: "a", Annotated: true, RuntimeHandlers: []string{"kata"}, Defer: true}, {Name: "b", RuntimeHandlers: []string{"kata"}}},
		"asks in vain":    {{Name: "a", Annotated: true}, {Name: "b", Defer: true}},
		"shorter pattern": {{Name: "a", Drivers: []string{"a*b*"}}, {Name: "b", Drivers: []string{"a*"}}},
	} {
		if err := (&Policy{Rules: rules}).Validate(nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestARecordKeepsItsOrigin(t *testing.T) {
	origin := &CSIOrigin{VolumeID: "vol-1", Way: WayBlock, Rule: `rule "a"`, AccessMode: "SINGLE_NODE_WRITER", Private: "/p"}
	in := Instruction{CSI: origin}
	rec := record{Volume: Volume{CSI: in.CSI.clone(), GrowTo: 1 << 40}}
	raw, err := json.Marshal(&rec)
	if err != nil {
		t.Fatal(err)
	}
	var back record
	if err := json.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(rec.Volume, back.Volume); diff != "" || rec.CSI == origin {
		t.Error(diff)
	}
}

// FuzzPolicy: whatever the rules are, checking and deciding end, a policy that is
// valid decides every volume the same way twice, and no rule decides that an
// earlier one covers.
func FuzzPolicy(f *testing.F) {
	f.Add("*.com", "a.com", "xfs", "kata", "a.com", "", "true", true, true)
	f.Add("a*b*c", "a*", "", "", "aXbYc", "kata", "x", false, false)
	f.Add("[", "\\", "[^]", "-", "", "", "", false, true)
	f.Fuzz(func(t *testing.T, first, second, fs, runtime, driver, podRuntime, word string, known, requested bool) {
		p := &Policy{Rules: []Rule{
			{Name: "first", Drivers: []string{first}, Filesystems: []string{fs}, Defer: true},
			{Name: "second", Drivers: []string{second}, RuntimeHandlers: []string{runtime}},
			{Name: "third", Drivers: []string{second}, Filesystems: []string{fs}, Defer: true, Format: FormatGuest},
		}}
		valid := p.Validate([]string{"kata"})
		w := Wish{Driver: driver, FSType: fs, RuntimeHandler: podRuntime, RuntimeHandlerKnown: known, Requested: requested}
		if word != "" {
			w.Context = map[string]string{ContextKey: word}
		}
		a, errA := p.Decide(w)
		b, errB := p.Decide(w)
		if a != b || (errA == nil) != (errB == nil) {
			t.Fatalf("%+v, %v and then %+v, %v", a, errA, b, errB)
		}
		if requested && errA == nil && !a.Defer {
			t.Errorf("asked for and not deferred: %+v", a)
		}
		if valid == nil && a.Rule == `rule "third"` && p.Rules[0].covers(&p.Rules[2]) {
			t.Errorf("a rule that is covered decided: %+v", a)
		}
		if p.Rules[0].covers(&p.Rules[2]) && ruleDriverForm().MatchString(first) && ruleDriverForm().MatchString(second) &&
			p.Rules[2].matchesVolume(&w) && !p.Rules[0].matchesVolume(&w) {
			t.Errorf("%q covers %q and does not match %q", first, second, driver)
		}
	})
}
