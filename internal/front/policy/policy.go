// Package policy decides which volumes are deferred, to which handler, and how a blank device gets its filesystem. It
// does no I/O: a verdict depends only on the rules and on what is known of the volume.
package policy

import (
	"cmp"
	"fmt"
	"path"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// ContextKey is the only key of a CSI volume_context that is read. "true" means that the volume is deferred, "false"
// that it stays on the host, whatever the rules say. In an inline volume, whose attributes the pod's author writes,
// "true" only asks, as the pod's annotation does, and "false" is ignored.
const ContextKey = "crust-proxy.dev/defer-fs-ops"

// Input is what is known of a volume when it is decided whether to defer it.
type Input struct {
	Driver, FSType string
	// AccessMode is CSI's name of it, such as SINGLE_NODE_WRITER.
	AccessMode string
	// PodKnown is set if the pod is known. Its RuntimeHandler "" is the node's default runtime.
	PodKnown                  bool
	RuntimeHandler, Namespace string
	// StorageClass is that of the persistent volume, "" without one, and Needs is what the pod
	// needs of the volume: NeedSubPath, NeedFSGroup. If Missing is set, it is why they are not known.
	StorageClass string
	Needs        []string
	Missing      error
	// Annotated is set if the pod's annotation asks for this volume. Anybody who may create
	// a pod can write the annotation.
	Annotated bool
	// Inline is set for a volume that is specified in the pod itself: the pod's author writes its Context.
	Inline bool
	// Requested is set if the orchestrator has set defer_fs_ops in the request.
	Requested bool
	// Context is CSI's volume_context; only ContextKey is read.
	Context map[string]string
}

// Rule is a rule of the configuration. It decides for the volumes that it matches. An empty list matches all.
type Rule struct {
	Name string `yaml:"name"`
	// Drivers are names, or patterns in which * stands for any characters.
	Drivers         []string `yaml:"drivers,omitempty"`
	Filesystems     []string `yaml:"filesystems,omitempty"`
	RuntimeHandlers []string `yaml:"runtimeHandlers,omitempty"`
	// AccessModes are CSI's names, or those of Kubernetes' claims.
	AccessModes []string `yaml:"accessModes,omitempty"`
	// Namespaces are those of pods, and StorageClasses those of persistent volumes.
	Namespaces     []string `yaml:"namespaces,omitempty"`
	StorageClasses []string `yaml:"storageClasses,omitempty"`
	// Needs matches volumes of which the pod needs one of these.
	Needs []string `yaml:"needs,omitempty"`
	// Annotated restricts the rule to volumes that the pod's annotation names.
	Annotated bool `yaml:"annotated,omitempty"`
	Defer     bool `yaml:"defer"`
	// Handler and Format are for volumes that are deferred; empty means the default.
	Handler string              `yaml:"handler,omitempty"`
	Format  volume.FormatPolicy `yaml:"format,omitempty"`
	// MkfsOptions are arguments for mkfs of the rule's one filesystem.
	MkfsOptions []string `yaml:"mkfsOptions,omitempty"`
	// RootMode are the permissions of a new filesystem's root directory, in octal.
	RootMode string `yaml:"rootMode,omitempty"`
	// Grow defaults to true: an ext4 that is smaller than its device, and that the sandbox
	// cannot grow, is grown before it is handed over.
	Grow *bool `yaml:"grow,omitempty"`
	// ThenOnHost says whether this node's kernel may mount a volume that a sandbox had
	// read-write by this rule; empty is HostRefused.
	ThenOnHost ThenOnHost `yaml:"thenOnHost,omitempty"`
}

// ThenOnHost says whether a node's kernel may mount what a sandbox may have written.
type ThenOnHost string

// The values of ThenOnHost.
const (
	HostAllowed ThenOnHost = "allow"
	HostRefused ThenOnHost = "refuse"
)

// Policy decides which volumes are deferred. It is immutable: a new configuration makes another one.
type Policy struct {
	// Rules are tried in order; the first that matches decides.
	Rules []Rule
	// Format applies to rules that name none; FormatUnset is FormatHost.
	Format volume.FormatPolicy
	// Runtimes map pods to handlers; the first that matches counts.
	Runtimes []Runtime
}

// Verdict is the decision for a volume.
type Verdict struct {
	Defer bool
	// Rule names what decided: "defer_fs_ops of the request", "volume context", `rule "name"` or "no rule".
	Rule string
	// Passed explains why the rules before it do not match.
	Passed []string
	// Handler is the runtime handler; empty is the default one.
	Handler string
	// Format is never FormatUnset for a volume that is deferred.
	Format volume.FormatPolicy
	MakeFS volume.MakeFS
	// KeepSize: a filesystem that is smaller than its device is not grown on the node.
	KeepSize bool
}

// The values of Verdict.Rule where no rule decided. RuleRequested is that of the orchestrator's own defer_fs_ops.
const (
	RuleRequested = "defer_fs_ops of the request"
	byContext     = "volume context"
	byNoRule      = "no rule"
)

// Decide decides whether a volume is deferred. With an error, the verdict has only the rule that the error is about,
// if any. The request's defer_fs_ops decides first, then the volume context, then the rules; otherwise the volume is
// not deferred. A pod's annotation changes nothing about a volume that is deferred without it. All that it can do is
// let rules with annotated: true match, and an inline volume's attribute can do no more.
func (p *Policy) Decide(w Input) (Verdict, error) {
	if w.Inline {
		asked, _, err := contextSetting(w.Context)
		if err != nil {
			return Verdict{}, err
		}
		w.Annotated, w.Context = w.Annotated || asked, nil
	}
	plain := w
	plain.Annotated = false
	v, err := p.decide(plain)
	if err != nil || v.Defer || !w.Annotated {
		return v, err
	}
	if v, err = p.decide(w); err != nil || v.Defer {
		return v, err
	}
	return v, w.denyRequest(v.Rule)
}

// denyRequest is the error for a volume that the pod wants deferred and that stays on the
// host: a pod that asked is never given the volume on the host.
func (w *Input) denyRequest(rule string) error {
	asks := "the pod's annotation " + AnnotationKey + " asks for it to be deferred, and "
	if w.Inline {
		asks = "the pod's annotation " + AnnotationKey + " or the inline volume's attribute " + ContextKey + " asks for it to be deferred, and "
	}
	switch rule {
	case byContext:
		return volume.Errorf(volume.Denied, asks+"its volume attribute %s says \"false\": take the volume's name out of the annotation, or use a "+
			"volume without the attribute", ContextKey)
	case byNoRule:
		return volume.Errorf(volume.Denied, asks+"no rule of this node's policy that says annotated: true matches the driver %s with %s: take the "+
			"volume's name out of the annotation, or have such a rule added", sys.Clip(w.Driver), runtimeText(w.RuntimeHandler))
	default:
		return volume.Errorf(volume.Denied, asks+"the policy's %s keeps it on the host (driver %s, %s): take the volume's name out of the "+
			"annotation, or have the rule changed", rule, sys.Clip(w.Driver), runtimeText(w.RuntimeHandler))
	}
}

func runtimeText(handler string) string {
	if handler == "" {
		return "the node's default runtime"
	}
	return fmt.Sprintf("the runtime handler %q", sys.Clip(handler))
}

func (p *Policy) decide(w Input) (Verdict, error) {
	asked, said, err := contextSetting(w.Context)
	switch {
	case err != nil:
		return Verdict{}, err
	case w.Requested:
		return p.asked(w, RuleRequested)
	case said && asked:
		return p.asked(w, byContext)
	case said:
		return Verdict{Rule: byContext}, nil
	}
	return p.byRules(w)
}

// CouldDefer reports whether the policy could defer a volume for some pod, whatever the pod's
// runtime handler and annotation are. In doubt the answer is true.
func (p *Policy) CouldDefer(w Input) bool {
	asked, said, err := contextSetting(w.Context)
	if err != nil || w.Requested || asked {
		return true
	}
	if said && !w.Inline {
		return false
	}
	w.Annotated = true
	for i := range p.Rules {
		rule := &p.Rules[i]
		switch {
		case !rule.matchesVolume(&w):
		case rule.Defer:
			return true
		case len(rule.ByPod()) == 0 && !rule.Annotated:
			return false // it matches the volume of every pod, so no later rule decides
		}
	}
	return false
}

// ThenOnHost says whether the host may mount a volume after a sandbox. The label is that of the rule by which the
// volume was deferred, as in Verdict.Rule. If there is no such rule, those that could defer the volume for some pod
// decide: one that refuses comes first. The answer is "" if there is none.
func (p *Policy) ThenOnHost(w Input, label string) (then ThenOnHost) {
	w.Annotated = true
	for i := range p.Rules {
		rule := &p.Rules[i]
		is := cmp.Or(rule.ThenOnHost, HostRefused)
		switch {
		case rule.Defer && rule.label() == label:
			return is
		case rule.Defer && rule.matchesVolume(&w) && then != HostRefused:
			then = is
		}
	}
	return then
}

// contextSetting reads ContextKey: whether it asks for deferral, and whether it is set. The
// error repeats only the beginning of the value, which somebody else wrote.
func contextSetting(context map[string]string) (asked, said bool, err error) {
	switch value, said := context[ContextKey]; {
	case !said:
		return false, false, nil
	case value == "true", value == "false":
		return value == "true", true, nil
	default:
		return false, true, volume.Errorf(volume.Invalid, "the volume context has %s: %q: write \"true\" or \"false\" there",
			ContextKey, sys.Clip(value))
	}
}

func (p *Policy) byRules(w Input) (Verdict, error) {
	var passed []string
	for i := range p.Rules {
		rule := &p.Rules[i]
		v := Verdict{Rule: rule.label(), Passed: passed}
		switch failed := rule.mismatch(&w); {
		case failed == nil && rule.Defer:
			v = p.deferred(rule, v.Rule)
			v.Passed = passed
			return p.withHandler(v, &w)
		case failed == nil:
			return v, nil
		case !failed.known:
			advice := "configure cluster so that it is, say " + ContextKey + ": \"true\" or \"false\" in the volume's attributes, or "
			if w.Inline { // those are the pod author's
				advice = "configure cluster so that it is, or "
			}
			return v, w.undecidable(rule, failed, "", advice+"take "+failed.key+" out of the rule")
		default:
			passed = append(passed, v.Rule+": "+failed.String())
		}
	}
	return Verdict{Rule: byNoRule, Passed: passed}, nil
}

func (p *Policy) deferred(how *Rule, label string) Verdict {
	mode, _ := strconv.ParseUint(how.RootMode, 8, 12) // Validate has checked it
	return Verdict{
		Defer: true, Rule: label, Handler: how.Handler, Format: cmp.Or(how.Format, p.Format, volume.FormatHost),
		MakeFS: volume.MakeFS{Options: how.MkfsOptions, RootMode: uint32(mode)}, KeepSize: how.Grow != nil && !*how.Grow,
	}
}

// asked is the verdict for a volume that the request or the volume context asks to defer. How
// it is deferred is up to the first matching rule that defers, if there is one.
func (p *Policy) asked(w Input, word string) (Verdict, error) {
	v := p.deferred(&Rule{}, word)
	var open []*Rule // those that may match, depending on the pod
	for i := range p.Rules {
		rule := &p.Rules[i]
		if !rule.Defer || rule.Annotated {
			continue // nor may what a pod's author writes decide how
		}
		failed := rule.mismatch(&w)
		if failed == nil {
			v = p.deferred(rule, word)
			break
		}
		if !failed.known {
			open = append(open, rule)
		}
	}
	for _, rule := range open {
		if other := p.deferred(rule, word); other.Handler != v.Handler || other.Format != v.Format || !other.MakeFS.Equal(v.MakeFS) || other.KeepSize != v.KeepSize {
			failed := rule.mismatch(&w)
			return Verdict{Rule: rule.label()}, w.undecidable(rule, failed, ", which is to be deferred ("+word+")", "take "+failed.key+
				" out of the rule, or handler, format, mkfsOptions, rootMode and grow")
		}
	}
	return p.withHandler(v, &w)
}

// globMatches matches a whole driver name, which holds no slash.
func globMatches(pattern, name string) bool {
	ok, _ := path.Match(pattern, name) // a bad pattern matches nothing
	return ok
}

// label names a rule in records and errors.
func (r *Rule) label() string { return fmt.Sprintf("rule %q", r.Name) }

// IsRule reports whether a Verdict.Rule names a rule.
func IsRule(label string) bool { return strings.HasPrefix(label, "rule ") }

// configPath names a rule in an error of the configuration.
func (r *Rule) configPath(i int) string {
	return "policy.rules[" + strconv.Itoa(i) + "] (" + strconv.Quote(sys.Clip(r.Name)) + ")"
}
