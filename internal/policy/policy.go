// Package policy decides which volumes are deferred, to which handler, and how a blank
// device gets its filesystem. It is pure: rules and what is known of a volume go in, a
// verdict comes out.
package policy

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// ContextKey is the one key of a CSI volume_context that is read: "true" has the
// volume deferred, "false" keeps it on the host, whatever the rules say. Of an inline
// volume, whose attributes the pod's author writes, "true" only asks, as the pod's
// annotation does, and "false" says nothing.
const ContextKey = "crust-proxy.dev/defer-fs-ops"

// Input is what is known of a volume when it is decided whether to defer it.
type Input struct {
	Driver, FSType string
	// AccessMode is CSI's name of it, such as SINGLE_NODE_WRITER.
	AccessMode string
	// RuntimeHandler is the pod's. Where RuntimeHandlerKnown is set it may be
	// empty: that is a pod with the node's default runtime.
	RuntimeHandler      string
	RuntimeHandlerKnown bool
	// Annotated is set where the pod asks for this volume by its annotation, which
	// anybody who may make a pod can write.
	Annotated bool
	// Inline is set for a volume that stands in the pod itself: the pod's author
	// writes its Context.
	Inline bool
	// Requested is the CO's own defer_fs_ops.
	Requested bool
	// Context is CSI's volume_context; only ContextKey is read.
	Context map[string]string
}

// Rule decides for the volumes that it matches, as it stands in the configuration. A list
// that is empty matches all.
type Rule struct {
	Name string `json:"name"`
	// Drivers are names, or patterns in which * stands for any characters.
	Drivers         []string `json:"drivers,omitempty"`
	Filesystems     []string `json:"filesystems,omitempty"`
	RuntimeHandlers []string `json:"runtimeHandlers,omitempty"`
	// AccessModes are CSI's names, or those of Kubernetes' claims.
	AccessModes []string `json:"accessModes,omitempty"`
	// Annotated has the rule match only volumes that the pod's annotation names.
	Annotated bool `json:"annotated,omitempty"`
	Defer     bool `json:"defer"`
	// Handler and Format are for volumes that are deferred; where they are empty
	// the defaults hold.
	Handler string              `json:"handler,omitempty"`
	Format  volume.FormatPolicy `json:"format,omitempty"`
	// MkfsOptions are arguments for mkfs of the rule's one filesystem.
	MkfsOptions []string `json:"mkfsOptions,omitempty"`
	// RootMode are the permissions of a new filesystem's root directory, in octal.
	RootMode string `json:"rootMode,omitempty"`
	// Grow is true unless said otherwise: an ext4 that is smaller than its device, and
	// that the sandbox cannot grow, is grown before it is handed over.
	Grow *bool `json:"grow,omitempty"`
}

// makeFS is how a filesystem is made. The form of the mode was checked with the rule.
func (r *Rule) makeFS() volume.MakeFS {
	mode, _ := strconv.ParseUint(r.RootMode, 8, 12)
	return volume.MakeFS{Options: r.MkfsOptions, RootMode: uint32(mode)}
}

// Policy decides which volumes are deferred. Nobody changes one after it was
// made: another one takes its place.
type Policy struct {
	// Rules are asked in order; the first that matches decides.
	Rules []Rule
	// Format holds where a rule names none; FormatUnset is FormatHost.
	Format volume.FormatPolicy
	// Runtimes say which handler serves which pods; the first that matches counts.
	Runtimes []Runtime
}

// Verdict is what was decided, and by what.
type Verdict struct {
	Defer bool
	// Rule is the word that decided: "defer_fs_ops of the request", "volume
	// context", `rule "name"` or "no rule".
	Rule string
	// Handler is the runtime handler; empty is the default one.
	Handler string
	// Format is never FormatUnset for a volume that is deferred.
	Format volume.FormatPolicy
	MakeFS volume.MakeFS
	// KeepSize: a filesystem that is smaller than its device is not grown on the node.
	KeepSize bool
}

// The words of a verdict that no rule gave. RuleRequested is that of the orchestrator's own
// defer_fs_ops.
const (
	RuleRequested = "defer_fs_ops of the request"
	byContext     = "volume context"
	byNoRule      = "no rule"
)

// Decide says whether a volume is deferred. With an error the verdict tells
// nothing but the rule that it is about, if any. The request's own word goes first,
// then the volume's, then the rules; what nothing asks for is not deferred. A
// pod's annotation changes nothing about a volume that is deferred without it. It
// can have the rules that wait for one match, and nothing else; nor can an inline
// volume's attributes.
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

// denyRequest says who keeps a volume on the host that the pod wants deferred. It
// is never done as if the pod had not asked.
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

// CouldDefer tells whether the policy could defer a volume for some pod, whatever the pod's
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
		case len(rule.RuntimeHandlers) == 0 && !rule.Annotated:
			return false // it takes every pod's volume, so no later rule decides
		}
	}
	return false
}

// contextSetting reads the volume context: what it asks for, and whether it says
// anything. The value is not repeated beyond a bound: it is somebody else's text.
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
	for i := range p.Rules {
		rule := &p.Rules[i]
		if !rule.matchesVolume(&w) {
			continue
		}
		if rule.needsHandler(&w) {
			advice := "say " + ContextKey + ": \"true\" or \"false\" in the volume's attributes, "
			if w.Inline {
				advice = "" // those are the pod author's
			}
			return Verdict{Rule: rule.label()}, volume.Errorf(volume.Unsupported, "the policy's rule %q cannot be decided for this volume of driver %s: it goes by "+
				"the pod's runtime handler, which is not known here: configure cluster so that it is, %sor take runtimeHandlers out of the rule",
				rule.Name, sys.Clip(w.Driver), advice)
		}
		if rule.matchesHandler(&w) {
			return p.verdict(rule, &w)
		}
	}
	return Verdict{Rule: byNoRule}, nil
}

func (p *Policy) verdict(rule *Rule, w *Input) (Verdict, error) {
	v := Verdict{Defer: rule.Defer, Rule: rule.label()}
	if !rule.Defer {
		return v, nil
	}
	p.apply(rule, &v)
	return p.withHandler(v, w)
}

// apply sets how a volume is deferred to what the rule says.
func (p *Policy) apply(rule *Rule, v *Verdict) {
	v.Handler, v.Format = rule.Handler, cmp.Or(rule.Format, p.Format, volume.FormatHost)
	v.MakeFS, v.KeepSize = rule.makeFS(), rule.Grow != nil && !*rule.Grow
}

// asked is the verdict of a word outside the rules. How the volume is deferred is
// then the first matching rule's that defers, if there is one.
func (p *Policy) asked(w Input, word string) (Verdict, error) {
	v := Verdict{Defer: true, Rule: word}
	p.apply(&Rule{}, &v)
	var open []*Rule // those that may be the first or not
	for i := range p.Rules {
		rule := &p.Rules[i]
		if !rule.Defer || rule.Annotated || !rule.matchesVolume(&w) {
			continue // what a pod's author writes does not say how, either
		}
		if rule.needsHandler(&w) {
			open = append(open, rule)
		} else if rule.matchesHandler(&w) {
			p.apply(rule, &v)
			break
		}
	}
	for _, rule := range open {
		other := v
		p.apply(rule, &other)
		if other.Handler != v.Handler || other.Format != v.Format || !other.MakeFS.Equal(v.MakeFS) || other.KeepSize != v.KeepSize {
			return Verdict{Rule: rule.label()}, volume.Errorf(volume.Unsupported, "this volume of driver %s is to be deferred (%s), and how cannot be decided: the "+
				"policy's rule %q goes by the pod's runtime handler, which is not known here: take runtimeHandlers out of the rule, "+
				"or handler, format, mkfsOptions, rootMode and grow", sys.Clip(w.Driver), word, rule.Name)
		}
	}
	return p.withHandler(v, &w)
}

func (r *Rule) matchesVolume(w *Input) bool {
	return (w.Annotated || !r.Annotated) && (len(r.Drivers) == 0 || slices.ContainsFunc(r.Drivers, func(p string) bool { return globMatches(p, w.Driver) })) &&
		allows(r.Filesystems, w.FSType) && matchesMode(r.AccessModes, w.AccessMode)
}

// needsHandler tells whether the rule goes by a handler that is not known. A
// guess could put a volume that another pod expects on the host into a sandbox.
func (r *Rule) needsHandler(w *Input) bool {
	return len(r.RuntimeHandlers) > 0 && !w.RuntimeHandlerKnown
}

func (r *Rule) matchesHandler(w *Input) bool { return allows(r.RuntimeHandlers, w.RuntimeHandler) }

func allows(list []string, value string) bool {
	return len(list) == 0 || slices.Contains(list, value)
}

// globMatches matches a whole driver name, which holds no slash.
func globMatches(pattern, name string) bool {
	ok, _ := path.Match(pattern, name) // a bad pattern matches nothing
	return ok
}

// label is how records and errors name a rule.
func (r *Rule) label() string { return fmt.Sprintf("rule %q", r.Name) }

// configPath names a rule in an error of the configuration.
func (r *Rule) configPath(i int) string {
	return "policy.rules[" + strconv.Itoa(i) + "] (" + strconv.Quote(sys.Clip(r.Name)) + ")"
}
