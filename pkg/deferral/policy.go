package deferral

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"
)

// ContextKey is the one key of a CSI volume_context that is read: "true" has the
// volume deferred, "false" keeps it on the host, whatever the rules say.
const ContextKey = "crust-proxy.dev/defer-fs-ops"

// FormatPolicy says who formats a blank device.
type FormatPolicy string

// Who formats a blank device.
const (
	// FormatUnset leaves it to the policy's default, and that to the host.
	FormatUnset FormatPolicy = ""
	FormatHost  FormatPolicy = "host"
	FormatGuest FormatPolicy = "guest"
	FormatNever FormatPolicy = "never"
)

// Wish is what is known of a volume when it is decided whether to defer it.
type Wish struct {
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
	// Requested is the CO's own defer_fs_ops.
	Requested bool
	// Context is CSI's volume_context; only ContextKey is read.
	Context map[string]string
}

// Rule decides for the volumes that it matches. A list that is empty matches all.
type Rule struct {
	Name string
	// Drivers are names, or patterns in which * stands for any characters.
	Drivers         []string
	Filesystems     []string
	RuntimeHandlers []string
	// AccessModes are CSI's names.
	AccessModes []string
	// Annotated has the rule match only volumes that the pod's annotation names.
	Annotated bool
	Defer     bool
	// Handler and Format are for volumes that are deferred; where they are empty
	// the defaults hold.
	Handler string
	Format  FormatPolicy
}

// Policy decides which volumes are deferred. Nobody changes one after it was
// made: another one takes its place.
type Policy struct {
	// Rules are asked in order; the first that matches decides.
	Rules []Rule
	// Format holds where a rule names none; FormatUnset is FormatHost.
	Format FormatPolicy
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
	Format FormatPolicy
}

// The words of a verdict that no rule gave.
const (
	byRequest = "defer_fs_ops of the request"
	byContext = "volume context"
	byNoRule  = "no rule"
)

// Decide says whether a volume is deferred. With an error the verdict tells
// nothing but the rule that it is about, if any. The request's own word goes first,
// then the volume's, then the rules; what nothing asks for is not deferred. A
// pod's annotation changes nothing about a volume that is deferred without it. It
// can have the rules that wait for one match, and nothing else.
func (p *Policy) Decide(w Wish) (Verdict, error) {
	plain := w
	plain.Annotated = false
	v, err := p.decide(plain)
	if err != nil || v.Defer || !w.Annotated {
		return v, err
	}
	if v, err = p.decide(w); err != nil || v.Defer {
		return v, err
	}
	return v, w.asksInVain(v.Rule)
}

// asksInVain says who keeps a volume on the host that the pod wants deferred. It
// is never done as if the pod had not asked.
func (w *Wish) asksInVain(rule string) error {
	const asks = "the pod's annotation " + AnnotationKey + " asks for it to be deferred, and "
	switch rule {
	case byContext:
		return Errorf(Denied, asks+"its volume attribute %s says \"false\": take the volume's name out of the annotation, or use a "+
			"volume without the attribute", ContextKey)
	case byNoRule:
		return Errorf(Denied, asks+"no rule of this node's policy that says annotated: true matches the driver %s with %s: take the "+
			"volume's name out of the annotation, or have such a rule added", clip(w.Driver), runtimeText(w.RuntimeHandler))
	default:
		return Errorf(Denied, asks+"the policy's %s keeps it on the host (driver %s, %s): take the volume's name out of the "+
			"annotation, or have the rule changed", rule, clip(w.Driver), runtimeText(w.RuntimeHandler))
	}
}

func runtimeText(handler string) string {
	if handler == "" {
		return "the node's default runtime"
	}
	return fmt.Sprintf("the runtime handler %q", clip(handler))
}

func (p *Policy) decide(w Wish) (Verdict, error) {
	asked, said, err := contextWord(w.Context)
	switch {
	case err != nil:
		return Verdict{}, err
	case w.Requested:
		return p.asked(w, byRequest)
	case said && asked:
		return p.asked(w, byContext)
	case said:
		return Verdict{Rule: byContext}, nil
	}
	return p.byRules(w)
}

// contextWord reads the volume context: what it asks for, and whether it says
// anything. The value is not repeated beyond a bound: it is somebody else's text.
func contextWord(context map[string]string) (asked, said bool, err error) {
	switch value, said := context[ContextKey]; {
	case !said:
		return false, false, nil
	case value == "true", value == "false":
		return value == "true", true, nil
	default:
		return false, true, Errorf(Invalid, "the volume context has %s: %q: write \"true\" or \"false\" there",
			ContextKey, clip(value))
	}
}

func (p *Policy) byRules(w Wish) (Verdict, error) {
	for i := range p.Rules {
		rule := &p.Rules[i]
		if !rule.matchesVolume(&w) {
			continue
		}
		if rule.needsHandler(&w) {
			return Verdict{Rule: rule.word()}, Errorf(Unsupported, "the policy's rule %q cannot be decided for this volume of driver %s: it goes by "+
				"the pod's runtime handler, which is not known here: configure cluster so that it is, say %s: \"true\" or "+
				"\"false\" in the volume's attributes, or take runtimeHandlers out of the rule", rule.Name, clip(w.Driver), ContextKey)
		}
		if rule.matchesHandler(&w) {
			return p.verdict(rule), nil
		}
	}
	return Verdict{Rule: byNoRule}, nil
}

func (p *Policy) verdict(rule *Rule) Verdict {
	v := Verdict{Defer: rule.Defer, Rule: rule.word()}
	if rule.Defer {
		v.Handler, v.Format = rule.Handler, cmp.Or(rule.Format, p.format())
	}
	return v
}

// asked is the verdict of a word outside the rules. How the volume is deferred is
// then the first matching rule's that defers, if there is one.
func (p *Policy) asked(w Wish, word string) (Verdict, error) {
	v := Verdict{Defer: true, Rule: word, Format: p.format()}
	var open []*Rule // those that may be the first or not
	for i := range p.Rules {
		rule := &p.Rules[i]
		if !rule.Defer || rule.Annotated || !rule.matchesVolume(&w) {
			continue // what a pod's author writes does not say how, either
		}
		if rule.needsHandler(&w) {
			open = append(open, rule)
		} else if rule.matchesHandler(&w) {
			found := p.verdict(rule)
			v.Handler, v.Format = found.Handler, found.Format
			break
		}
	}
	for _, rule := range open {
		if other := p.verdict(rule); other.Handler != v.Handler || other.Format != v.Format {
			return Verdict{Rule: rule.word()}, Errorf(Unsupported, "this volume of driver %s is to be deferred (%s), and how cannot be decided: the "+
				"policy's rule %q goes by the pod's runtime handler, which is not known here: take runtimeHandlers out of the rule, "+
				"or handler and format", clip(w.Driver), word, rule.Name)
		}
	}
	return v, nil
}

func (p *Policy) format() FormatPolicy { return cmp.Or(p.Format, FormatHost) }

// matchesVolume compares all that does not depend on the pod.
func (r *Rule) matchesVolume(w *Wish) bool {
	return (w.Annotated || !r.Annotated) && (len(r.Drivers) == 0 || slices.ContainsFunc(r.Drivers, func(p string) bool { return globMatches(p, w.Driver) })) &&
		allows(r.Filesystems, w.FSType) && allows(r.AccessModes, w.AccessMode)
}

// needsHandler tells whether the rule goes by a handler that is not known. A
// guess could put a volume that another pod expects on the host into a sandbox.
func (r *Rule) needsHandler(w *Wish) bool {
	return len(r.RuntimeHandlers) > 0 && !w.RuntimeHandlerKnown
}

func (r *Rule) matchesHandler(w *Wish) bool { return allows(r.RuntimeHandlers, w.RuntimeHandler) }

func allows(list []string, value string) bool {
	return len(list) == 0 || slices.Contains(list, value)
}

// globMatches matches a whole driver name, which holds no slash.
func globMatches(pattern, name string) bool {
	ok, err := path.Match(pattern, name)
	return err == nil && ok
}

// word is how records and errors name a rule.
func (r *Rule) word() string { return fmt.Sprintf("rule %q", r.Name) }

// place names a rule in an error of the configuration.
func (r *Rule) place(i int) string {
	return "policy.rules[" + strconv.Itoa(i) + "] (" + strconv.Quote(clip(r.Name)) + ")"
}
