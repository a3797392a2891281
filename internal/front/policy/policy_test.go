package policy

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func examplePolicy() *Policy {
	return &Policy{
		Format: volume.FormatNever,
		Rules: []Rule{
			{Name: "not shared", AccessModes: []string{"MULTI_NODE_MULTI_WRITER"}},
			{Name: "xfs of lvm", Drivers: []string{"lvm"}, Filesystems: []string{"xfs"}, Defer: true, Format: volume.FormatGuest},
			{Name: "kata", Drivers: []string{"*.csi.example.com"}, RuntimeHandlers: []string{"kata", "kata-qemu"}, Defer: true, Handler: "kata"},
			{Name: "ebs", Drivers: []string{"ebs.csi.aws.com"}, Defer: true, Format: volume.FormatHost},
		},
	}
}

// noTrace leaves out how a verdict came about.
var noTrace = cmpopts.IgnoreFields(Verdict{}, "Passed")

func TestDecide(t *testing.T) {
	key := func(v string) map[string]string { return map[string]string{ContextKey: v, "other": "x"} }
	for name, c := range map[string]struct {
		wish Input
		want Verdict
	}{
		"nothing matches": {Input{Driver: "nfs"}, Verdict{Rule: "no rule"}},
		"first match wins": {Input{Driver: "ebs.csi.aws.com", AccessMode: "MULTI_NODE_MULTI_WRITER"},
			Verdict{Rule: `rule "not shared"`}},
		"own format":      {Input{Driver: "lvm", FSType: "xfs"}, Verdict{Defer: true, Rule: `rule "xfs of lvm"`, Format: volume.FormatGuest}},
		"other fs":        {Input{Driver: "lvm", FSType: "ext4"}, Verdict{Rule: "no rule"}},
		"pattern":         {Input{Driver: "a.csi.example.com", RuntimeHandler: "kata", PodKnown: true}, Verdict{Defer: true, Rule: `rule "kata"`, Handler: "kata", Format: volume.FormatNever}},
		"pattern, whole":  {Input{Driver: "a.csi.example.com.evil", RuntimeHandler: "kata", PodKnown: true}, Verdict{Rule: "no rule"}},
		"default runtime": {Input{Driver: "a.csi.example.com", PodKnown: true}, Verdict{Rule: "no rule"}},
		"request before all": {Input{Driver: "ebs.csi.aws.com", AccessMode: "MULTI_NODE_MULTI_WRITER", Requested: true, Context: key("false")},
			Verdict{Defer: true, Rule: "defer_fs_ops of the request", Format: volume.FormatHost}},
		"request, no rule":        {Input{Driver: "nfs", Requested: true}, Verdict{Defer: true, Rule: "defer_fs_ops of the request", Format: volume.FormatNever}},
		"context before rules":    {Input{Driver: "ebs.csi.aws.com", Context: key("false")}, Verdict{Rule: "volume context"}},
		"context asks":            {Input{Driver: "lvm", FSType: "xfs", Context: key("true")}, Verdict{Defer: true, Rule: "volume context", Format: volume.FormatGuest}},
		"context of others":       {Input{Driver: "nfs", Context: map[string]string{"x": "true"}}, Verdict{Rule: "no rule"}},
		"handler does not matter": {Input{Driver: "b.csi.example.com", Context: key("false")}, Verdict{Rule: "volume context"}},
	} {
		t.Run(name, func(t *testing.T) {
			check.Same(t, cmp.Diff(c.want, check.Value(examplePolicy().Decide(c.wish))(t), noTrace), "-want +got")
		})
	}
}

func TestCouldDefer(t *testing.T) {
	key := func(v string) map[string]string { return map[string]string{ContextKey: v} }
	deferring := func(change func(*Rule)) []Rule {
		rule := Rule{Name: "a", Defer: true}
		change(&rule)
		return []Rule{rule}
	}
	before := func(first Rule) []Rule { first.Name = "first"; return []Rule{first, {Name: "all", Defer: true}} }
	lvm := Input{Driver: "lvm", FSType: "ext4", AccessMode: "SINGLE_NODE_WRITER"}
	with := func(change func(*Input)) Input { w := lvm; change(&w); return w }
	for name, c := range map[string]struct {
		rules []Rule
		wish  Input
		want  bool
	}{
		"no rules":                             {nil, lvm, false},
		"a rule for all":                       {deferring(func(*Rule) {}), lvm, true},
		"its driver":                           {deferring(func(r *Rule) { r.Drivers = []string{"l*"} }), lvm, true},
		"another driver":                       {deferring(func(r *Rule) { r.Drivers = []string{"nfs"} }), lvm, false},
		"another filesystem":                   {deferring(func(r *Rule) { r.Filesystems = []string{"xfs"} }), lvm, false},
		"another access mode":                  {deferring(func(r *Rule) { r.AccessModes = []string{"ReadWriteMany"} }), lvm, false},
		"pods of a runtime":                    {deferring(func(r *Rule) { r.RuntimeHandlers = []string{"kata"} }), lvm, true},
		"pods of a namespace":                  {deferring(func(r *Rule) { r.Namespaces = []string{"shop"} }), lvm, true},
		"some needs stay on the host":          {before(Rule{Needs: []string{NeedSubPath}}), lvm, true},
		"a class stays on the host":            {before(Rule{StorageClasses: []string{"slow"}}), lvm, true},
		"a namespace stays on the host":        {before(Rule{Namespaces: []string{"shop"}}), lvm, true},
		"pods that ask":                        {deferring(func(r *Rule) { r.RuntimeHandlers, r.Annotated = []string{"kata"}, true }), lvm, true},
		"a rule that keeps all on the host":    {before(Rule{}), lvm, false},
		"a rule that keeps it on the host":     {before(Rule{Drivers: []string{"lvm"}}), lvm, false},
		"a rule that keeps others there":       {before(Rule{Drivers: []string{"nfs"}}), lvm, true},
		"a rule that keeps some pods' there":   {before(Rule{RuntimeHandlers: []string{"runc"}}), lvm, true},
		"a rule that refuses those who ask":    {before(Rule{Annotated: true}), lvm, true},
		"excluded, for pods that ask first":    {[]Rule{{Name: "a", RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true}, {Name: "b"}}, lvm, true},
		"excluded, for pods that ask too late": {[]Rule{{Name: "b"}, {Name: "a", RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true}}, lvm, false},
		"the request":                          {before(Rule{}), with(func(w *Input) { w.Requested = true; w.Context = key("false") }), true},
		"the volume asks":                      {nil, with(func(w *Input) { w.Context = key("true") }), true},
		"the volume says no":                   {before(Rule{Drivers: []string{"nfs"}}), with(func(w *Input) { w.Context = key("false") }), false},
		"the volume says something odd":        {nil, with(func(w *Input) { w.Context = key("False") }), true},
		"an inline volume asks":                {nil, with(func(w *Input) { w.Inline = true; w.Context = key("true") }), true},
		"an inline volume cannot say no":       {before(Rule{Drivers: []string{"nfs"}}), with(func(w *Input) { w.Inline = true; w.Context = key("false") }), true},
		"a pod that may not be the only one":   {deferring(func(r *Rule) { r.RuntimeHandlers = []string{"kata"} }), with(func(w *Input) { w.PodKnown = true }), true},
	} {
		t.Run(name, func(t *testing.T) { check.Equal(t, (&Policy{Rules: c.rules}).CouldDefer(c.wish), c.want, "CouldDefer") })
	}
}

// TestCouldDeferCoversEveryPod compares CouldDefer with the verdicts for all kinds of pods.
func TestCouldDeferCoversEveryPod(t *testing.T) {
	deferred, never := 0, 0
	for _, wish := range everyVolume() {
		for name, policy := range map[string]*Policy{"example": examplePolicy(), "annotated": annotatedPolicy(), "by pod": podPolicy(), "empty": {}} {
			could := policy.CouldDefer(wish)
			if !could {
				never++
			}
			for _, pod := range everyPod(wish) {
				verdict, err := policy.Decide(pod)
				if err != nil || !verdict.Defer {
					continue
				}
				deferred++
				check.That(t, could, "%s: %+v: %+v", name, pod, verdict)
			}
		}
	}
	check.That(t, deferred != 0 && never != 0, "%d deferred, %d never", deferred, never)
}

func everyVolume() (all []Input) {
	for _, driver := range []string{"lvm", "nfs", "ebs.csi.aws.com", "a.csi.example.com"} {
		for _, mode := range []string{"SINGLE_NODE_WRITER", "MULTI_NODE_MULTI_WRITER"} {
			for _, fs := range []string{"ext4", "xfs"} {
				for _, context := range []map[string]string{nil, {ContextKey: "true"}, {ContextKey: "false"}} {
					all = append(all, Input{Driver: driver, FSType: fs, AccessMode: mode, Context: context})
				}
			}
		}
	}
	return all
}

func everyPod(w Input) (all []Input) {
	for i, handler := range []string{"unknown", "", "kata", "crust", "runc", "kata", "kata", "kata"} {
		for _, annotated := range []bool{false, true} {
			pod := w
			pod.Annotated = annotated
			pod.Namespace, pod.StorageClass = []string{"shop", "lab"}[i/2%2], []string{"fast", "slow"}[i%2]
			if i == 5 {
				pod.Needs = []string{NeedFSGroup}
			}
			if pod.PodKnown = handler != "unknown"; pod.PodKnown {
				pod.RuntimeHandler = handler
			}
			all = append(all, pod)
		}
	}
	return all
}

// podPolicy has a rule by each of what only the pod, or the volume in it, tells.
func podPolicy() *Policy {
	return &Policy{Rules: []Rule{
		{Name: "lab", Namespaces: []string{"lab", "test"}, Defer: true},
		{Name: "sub-paths", RuntimeHandlers: []string{"kata"}, Needs: []string{NeedSubPath}},
		{Name: "groups", Drivers: []string{"lvm"}, Needs: []string{NeedFSGroup, NeedSubPath}},
		{Name: "slow", StorageClasses: []string{"slow"}},
		{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true},
	}}
}

// TestRulesByThePod: what is not known of a pod is an error if a rule depends on it, and only then.
func TestRulesByThePod(t *testing.T) {
	p := podPolicy()
	check.Must(t, p.Validate([]string{"kata"}))
	busy := volume.Errorf(volume.Busy, "the claim is not bound")
	for name, c := range map[string]struct {
		wish   Input
		rule   string // in the verdict
		defers bool
		says   string // of the error
	}{
		"a namespace":          {Input{PodKnown: true, Namespace: "test"}, `rule "lab"`, true, ""},
		"no pod":               {Input{Namespace: "test"}, `rule "lab"`, false, "it goes by namespaces of the pod, which is not known here: configure cluster"},
		"needs it":             {Input{PodKnown: true, RuntimeHandler: "kata", Needs: []string{NeedFSGroup, NeedSubPath}}, `rule "sub-paths"`, false, ""},
		"needs something else": {Input{PodKnown: true, RuntimeHandler: "kata", Needs: []string{NeedFSGroup}}, `rule "kata"`, true, ""},
		"needs one of two":     {Input{PodKnown: true, Driver: "lvm", Needs: []string{NeedSubPath}}, `rule "groups"`, false, ""},
		"needs not known":      {Input{PodKnown: true, RuntimeHandler: "kata", Missing: busy}, `rule "sub-paths"`, false, "it goes by needs, and the claim is not bound"},
		"class not known":      {Input{PodKnown: true, RuntimeHandler: "runc", Missing: busy}, `rule "slow"`, false, "it goes by storageClasses, and the claim is not bound"},
		"decided before":       {Input{PodKnown: true, Namespace: "lab", Missing: busy}, `rule "lab"`, true, ""},
		"a class":              {Input{PodKnown: true, RuntimeHandler: "kata", StorageClass: "slow"}, `rule "slow"`, false, ""},
		"no class":             {Input{PodKnown: true, RuntimeHandler: "kata"}, `rule "kata"`, true, ""},
		"how, without a pod":   {Input{Requested: true}, RuleRequested, true, ""}, // each rule defers in the same way
		"the volume says no":   {Input{PodKnown: true, Missing: busy, Context: map[string]string{ContextKey: "false"}}, byContext, false, ""},
	} {
		got, err := p.Decide(c.wish)
		check.That(t, got.Rule == c.rule && got.Defer == c.defers && (err != nil) == (c.says != "") && (err == nil || strings.Contains(err.Error(), c.says)),
			"%s: %+v, %v", name, got, err)
		check.That(t, err == nil || c.wish.Missing == nil || volume.KindOf(err) == volume.Busy,
			"%s: it is classed %s, so kubelet may give up", name, volume.KindOf(err))
	}
	p.Rules[0].Format = volume.FormatNever
	_, err := p.Decide(Input{Requested: true})
	check.That(t, volume.KindOf(err) == volume.Unsupported && strings.Contains(err.Error(), "goes by namespaces of the pod"),
		"how it is deferred depends on the pod: %v", err)
}

func TestDecideNeverGuesses(t *testing.T) {
	for name, c := range map[string]struct {
		wish Input
		kind volume.Kind
		says []string
	}{
		"rule by runtime handler": {Input{Driver: "a.csi.example.com"}, volume.Unsupported, []string{`rule "kata"`, "runtimeHandlers", ContextKey}},
		"asked, and how is open": {Input{Driver: "a.csi.example.com", Requested: true}, volume.Unsupported,
			[]string{`rule "kata"`, "defer_fs_ops of the request", "runtimeHandlers"}},
		"odd value":              {Input{Driver: "nfs", Context: map[string]string{ContextKey: "True"}}, volume.Invalid, []string{ContextKey, `"True"`, `"false"`}},
		"odd value in a request": {Input{Driver: "nfs", Requested: true, Context: map[string]string{ContextKey: ""}}, volume.Invalid, []string{ContextKey}},
		"long value":             {Input{Context: map[string]string{ContextKey: strings.Repeat("x", 1<<16)}}, volume.Invalid, []string{"..."}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := examplePolicy().Decide(c.wish)
			check.Require(t, err != nil && volume.KindOf(err) == c.kind && !got.Defer && got.Handler == "",
				"got %+v, %v (%s)", got, err, volume.KindOf(err))
			check.Says(t, "the error", err.Error(), c.says...)
			check.That(t, len(err.Error()) <= 1000, "an error of %d bytes", len(err.Error()))
		})
	}
}

// TestAskedVolumesAreDeferredWithoutARule, and need no handler where the volume is deferred in
// the same way, whichever rule matches.
func TestAskedVolumesAreDeferredWithoutARule(t *testing.T) {
	want := Verdict{Defer: true, Rule: RuleRequested, Format: volume.FormatHost}
	for _, p := range []Policy{{}, {Rules: []Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true}}}} {
		got, err := p.Decide(Input{Driver: "lvm", Requested: true})
		check.That(t, err == nil && cmp.Equal(got, want, noTrace), "got %+v, %v", got, err)
	}
}

func TestThenOnHost(t *testing.T) {
	p := Policy{Rules: []Rule{
		{Name: "host", Drivers: []string{"nfs"}},
		{Name: "kata", Drivers: []string{"ebs"}, RuntimeHandlers: []string{"kata"}, Defer: true, ThenOnHost: HostAllowed},
		{Name: "asked", Drivers: []string{"e*"}, RuntimeHandlers: []string{"clh"}, Annotated: true, Defer: true},
		{Name: "lvm", Drivers: []string{"lvm"}, Defer: true, ThenOnHost: HostAllowed},
	}}
	for _, c := range []struct {
		driver, label string
		want          ThenOnHost
	}{
		{"ebs", `rule "kata"`, HostAllowed},
		{"ebs", `rule "asked"`, HostRefused},
		{"ebs", `rule "gone"`, HostRefused}, // one of two allows it
		{"lvm", `rule "gone"`, HostAllowed},
		{"lvm", byContext, HostAllowed},
		{"nfs", `rule "kata"`, HostAllowed},
		{"nfs", `rule "host"`, ""},
		{"nfs", "", ""},
	} {
		check.Equal(t, p.ThenOnHost(Input{Driver: c.driver}, c.label), c.want, "%s by %s", c.driver, c.label)
	}
}

func TestValidatePolicy(t *testing.T) {
	check.Must(t, examplePolicy().Validate([]string{"kata"}))
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
		`.namespaces[0]: "Shop"`:                rule(func(r *Rule) { r.Namespaces = []string{"Shop"} }),
		`.storageClasses[0]: "a/b"`:             rule(func(r *Rule) { r.StorageClasses = []string{"a/b"} }),
		`.needs[1]: "subpath" is not one of`:    rule(func(r *Rule) { r.Needs = []string{"fsGroup", "subpath"} }),
		`.rootMode: "0000"`:                     rule(func(r *Rule) { r.RootMode = "0000" }),
		"each mkfs has its own":                 rule(func(r *Rule) { r.MkfsOptions = []string{"-q"} }),
		`.accessModes[0]: "ReadWriteTwice"`:     rule(func(r *Rule) { r.AccessModes = []string{"ReadWriteTwice"} }),
		"have no effect":                        {{Name: "a", Format: volume.FormatGuest}},
		"thenOnHost have no effect":             {{Name: "a", ThenOnHost: HostAllowed}},
		`("a").thenOnHost: "yes"`:               rule(func(r *Rule) { r.ThenOnHost = "yes" }),
		`policy.rules[1] ("b").name: policy.rules[0] ("b")`: {
			{Name: "b", Drivers: []string{"x"}}, {Name: "b", Drivers: []string{"y"}}},
		`("second"): it can never match, because policy.rules[0] ("first")`: two(Rule{}, Rule{Drivers: []string{"x"}}),
		`("second"): it can never match, because policy.rules[0]`: two(Rule{Needs: []string{NeedSubPath, NeedFSGroup}, Namespaces: []string{"a", "b"}},
			Rule{Needs: []string{NeedSubPath}, Namespaces: []string{"b"}, StorageClasses: []string{"c"}}),
		`policy.rules[0] ("a").annotated: anybody`:                                 {{Name: "a", Annotated: true, Defer: true}},
		`("second"): it can never match`:                                           two(Rule{AccessModes: []string{"ReadWriteOnce"}}, Rule{AccessModes: []string{"SINGLE_NODE_WRITER"}}),
		`("second"): it can never match, because policy.rules[0] ("first") stands`: two(Rule{}, Rule{Annotated: true, Defer: true, RuntimeHandlers: []string{"k"}}),
		`it can never match`: two(Rule{Drivers: []string{"*.com"}, Filesystems: []string{"xfs", "ext4"}},
			Rule{Drivers: []string{"a.com", "*b*.com"}, Filesystems: []string{"ext4"}, AccessModes: []string{"SINGLE_NODE_WRITER"}}),
	} {
		err := (&Policy{Rules: rules}).Validate([]string{"kata"})
		check.That(t, err != nil && volume.KindOf(err) == volume.Invalid && strings.Contains(err.Error(), want), "%q: got %v", want, err)
	}
	for _, name := range []string{"", " x", "a\nb", strings.Repeat("x", 64), "\x1b[2J"} {
		err := (&Policy{Rules: []Rule{{Name: name}}}).Validate(nil)
		check.That(t, err != nil && strings.Contains(err.Error(), "policy.rules[0]") && !strings.ContainsAny(err.Error(), "\x1b\n"),
			"%q: got %v", name, err)
	}
	all := Policy{Format: "x", Rules: []Rule{{Name: "a", Drivers: []string{"/"}}, {Name: "b", Handler: "c", Defer: true, Drivers: []string{"d"}}}}
	for _, want := range []string{"policy.format", "rules[0]", "rules[1]"} {
		check.Fails(t, all.Validate(nil), want)
	}
	check.That(t, (&Policy{Rules: make([]Rule, maxRules+1)}).Validate(nil) != nil, "any number of rules is taken")
}

// TestRuntimes: a pod's volume is for the handler of its runtime, or refused. A rule is, if none of its runtimes can
// have the volume.
func TestRuntimes(t *testing.T) {
	for _, c := range []struct {
		runtimes      []string // of the rule, and asked for is the last one
		named, want   string
		refused, rule bool // refused are the volume and the whole rule
	}{
		{[]string{"kata-qemu"}, "", "kata", false, false}, {[]string{"kata-qemu"}, "kata", "kata", false, false},
		{[]string{"kata-qemu"}, "crust", "", true, true}, {[]string{"runc"}, "", "", true, true}, {[]string{"kata-qemu", "runc"}, "", "", true, false},
		{[]string{"other"}, "crust", "crust", false, false}, {nil, "crust", "crust", false, false},
	} {
		p := &Policy{
			Runtimes: []Runtime{{Pattern: "kata-*", Handler: "kata"}, {Pattern: "runc", Refuse: "no kernel of its own"}},
			Rules:    []Rule{{Name: "a", RuntimeHandlers: c.runtimes, Handler: c.named, Defer: true}},
		}
		wish := Input{Driver: "d", PodKnown: len(c.runtimes) > 0}
		if wish.PodKnown {
			wish.RuntimeHandler = c.runtimes[len(c.runtimes)-1]
		}
		got, err := p.Decide(wish)
		check.That(t, (err != nil) == c.refused && got.Handler == c.want && got.Defer != c.refused && (err == nil || volume.KindOf(err) == volume.Unsupported),
			"%+v: %+v, %v", c, got, err)
		err = p.Validate([]string{"kata", "crust"})
		check.That(t, (err != nil) == c.rule, "%+v: the rule: %v", c, err)
	}
}

func TestRulesThatOnlyOverlapMayStandTogether(t *testing.T) {
	for name, rules := range map[string][]Rule{
		"needs first":     {{Name: "a", Needs: []string{NeedSubPath}}, {Name: "b", Needs: []string{NeedSubPath, NeedFSGroup}}, {Name: "c"}},
		"classes":         {{Name: "a", StorageClasses: []string{"x"}}, {Name: "b", Namespaces: []string{"x"}}},
		"special first":   {{Name: "a", Drivers: []string{"x.com"}}, {Name: "b", Drivers: []string{"*.com"}}, {Name: "c"}},
		"one of two":      {{Name: "a", Drivers: []string{"x"}}, {Name: "b", Drivers: []string{"x", "y"}}},
		"handlers":        {{Name: "a", RuntimeHandlers: []string{"kata"}}, {Name: "b"}},
		"annotated first": {{Name: "a", Annotated: true, RuntimeHandlers: []string{"kata"}, Defer: true}, {Name: "b", RuntimeHandlers: []string{"kata"}}},
		"asks in vain":    {{Name: "a", Annotated: true}, {Name: "b", Defer: true}},
		"CSI's names":     {{Name: "a", AccessModes: []string{"SINGLE_NODE_WRITER"}}, {Name: "b", AccessModes: []string{"SINGLE_NODE_MULTI_WRITER"}}},
		"shorter pattern": {{Name: "a", Drivers: []string{"a*b*"}}, {Name: "b", Drivers: []string{"a*"}}},
	} {
		check.NoError(t, (&Policy{Rules: rules}).Validate(nil), "%s", name)
	}
}

// FuzzPolicy: whatever the rules are, checking and deciding end, a policy that is valid decides every volume the same
// way twice, and no rule decides that an earlier one covers.
func FuzzPolicy(f *testing.F) {
	f.Add("*.com", "a.com", "xfs", "kata", "a.com", "", "true", true, true)
	f.Add("a*b*c", "a*", "", "", "aXbYc", "kata", "x", false, false)
	f.Add("[", "\\", "[^]", "-", "", "", "", false, true)
	f.Fuzz(func(t *testing.T, first, second, fs, runtime, driver, podRuntime, word string, known, requested bool) {
		p := &Policy{Rules: []Rule{
			{Name: "first", Drivers: []string{first}, Filesystems: []string{fs}, Defer: true},
			{Name: "second", Drivers: []string{second}, RuntimeHandlers: []string{runtime}},
			{Name: "third", Drivers: []string{second}, Filesystems: []string{fs}, Defer: true, Format: volume.FormatGuest},
		}}
		valid := p.Validate([]string{"kata"})
		w := Input{Driver: driver, FSType: fs, RuntimeHandler: podRuntime, PodKnown: known, Requested: requested}
		if word != "" {
			w.Context = map[string]string{ContextKey: word}
		}
		a, errA := p.Decide(w)
		b, errB := p.Decide(w)
		check.Require(t, cmp.Equal(a, b) && (errA == nil) == (errB == nil), "%+v, %v and then %+v, %v", a, errA, b, errB)
		check.That(t, !requested || errA != nil || a.Defer, "asked for and not deferred: %+v", a)
		check.That(t, valid != nil || a.Rule != `rule "third"` || !p.Rules[0].covers(&p.Rules[2]), "a rule that is covered decided: %+v", a)
		if p.Rules[0].covers(&p.Rules[2]) && ruleDriverForm().MatchString(first) && ruleDriverForm().MatchString(second) &&
			p.Rules[2].matchesVolume(&w) && !p.Rules[0].matchesVolume(&w) {
			t.Errorf("%q covers %q and does not match %q", first, second, driver)
		}
	})
}

// TestAccessModesOfClaims goes over what kubelet sends for each mode of a claim.
func TestAccessModesOfClaims(t *testing.T) {
	// By the claim's mode: what a driver gets that reports SINGLE_NODE_MULTI_WRITER, and what every other driver gets.
	sent := map[string][2]string{
		"ReadWriteOnce":    {"SINGLE_NODE_MULTI_WRITER", "SINGLE_NODE_WRITER"},
		"ReadWriteOncePod": {"SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_WRITER"},
		"ReadOnlyMany":     {"MULTI_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY"},
		"ReadWriteMany":    {"MULTI_NODE_MULTI_WRITER", "MULTI_NODE_MULTI_WRITER"},
	}
	for word, matches := range map[string][]string{ // the modes of claims that a rule matches, with (+) or without the capability
		"SINGLE_NODE_WRITER":        {"ReadWriteOnce+", "ReadWriteOnce", "ReadWriteOncePod"},
		"SINGLE_NODE_MULTI_WRITER":  {"ReadWriteOnce+"},
		"SINGLE_NODE_SINGLE_WRITER": {"ReadWriteOncePod+"},
		"ReadWriteOnce":             {"ReadWriteOnce+", "ReadWriteOnce", "ReadWriteOncePod"},
		"ReadWriteOncePod":          {"ReadWriteOncePod+"},
		"ReadOnlyMany":              {"ReadOnlyMany+", "ReadOnlyMany"},
		"ReadWriteMany":             {"ReadWriteMany+", "ReadWriteMany"},
		"MULTI_NODE_SINGLE_WRITER":  nil,
	} {
		policy := &Policy{Rules: []Rule{{Name: "r", AccessModes: []string{word}, Defer: true}}}
		check.NoError(t, policy.Validate([]string{"kata"}), "%s is refused in a rule", word)
		for claim, modes := range sent {
			for i, mode := range modes {
				check.Equal(t, ModeOf(claim, i == 0), mode, "how %s is sent", claim)
				name := claim + []string{"+", ""}[i]
				verdict := check.Value(policy.Decide(Input{Driver: "d", AccessMode: mode}))(t)
				check.Equal(t, verdict.Defer, slices.Contains(matches, name), "a rule by %s, a volume by %s, sent as %s: deferred", word, name, mode)
			}
		}
	}
}

func TestAccessModesAreExplained(t *testing.T) {
	policy := &Policy{Rules: []Rule{
		{Name: "pod", AccessModes: []string{"ReadWriteOncePod", "MULTI_NODE_SINGLE_WRITER"}, Defer: true},
		{Name: "once", AccessModes: []string{"SINGLE_NODE_WRITER"}, Defer: true},
	}}
	got := policy.Explain()
	check.That(t, len(got) == 2 && strings.HasPrefix(got[0], `policy.rules[0] ("pod").accessModes: ReadWriteOncePod matches SINGLE_NODE_SINGLE_WRITER`) &&
		strings.Contains(got[1], "SINGLE_NODE_MULTI_WRITER"), "got %q", got)
}
