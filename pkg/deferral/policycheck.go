package deferral

import (
	"errors"
	"slices"
	"strings"
)

// maxRules bounds the look at each pair of rules.
const maxRules = 1000

var (
	ruleDriverForm     = lazily(`^[A-Za-z0-9*]([A-Za-z0-9.*-]{0,61}[A-Za-z0-9*])?$`)
	runtimeHandlerForm = lazily(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	ruleNameForm       = lazily(`^[\p{L}\p{N}][\p{L}\p{N} ._/-]{0,62}$`)
)

// accessModes are CSI's names.
func accessModes() []string {
	return []string{
		"SINGLE_NODE_WRITER", "SINGLE_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY", "MULTI_NODE_SINGLE_WRITER",
		"MULTI_NODE_MULTI_WRITER", "SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_MULTI_WRITER",
	}
}

// Validate tells everything that is wrong with a policy. The handlers are the
// names of those that are configured.
func (p *Policy) Validate(handlers []string) error {
	if len(p.Rules) > maxRules {
		return Errorf(Invalid, "policy.rules: %d rules are more than the %d that are taken", len(p.Rules), maxRules)
	}
	var found []error
	if !p.Format.known() {
		found = append(found, Errorf(Invalid, "policy.format: %q is none of host, guest, never", clip(string(p.Format))))
	}
	for i := range p.Rules {
		found = append(found, p.Rules[i].problems(i, handlers)...)
		found = append(found, p.compare(i)...)
	}
	return errors.Join(found...)
}

func (f FormatPolicy) known() bool {
	switch f {
	case FormatUnset, FormatHost, FormatGuest, FormatNever:
		return true
	}
	return false
}

// problems are what is wrong with one rule by itself.
func (r *Rule) problems(i int, handlers []string) []error {
	var found []error
	wrong := func(format string, args ...any) {
		found = append(found, Errorf(Invalid, "%s"+format, append([]any{r.place(i)}, args...)...))
	}
	if !ruleNameForm().MatchString(r.Name) {
		wrong(".name: it is empty, longer than 63 characters, or not of letters, digits, spaces and ._/-: " +
			"records and errors name the rule by it")
	}
	for _, list := range r.lists() {
		for n, value := range list.values {
			if !list.takes(value) {
				wrong(".%s[%d]: %q is not %s", list.key, n, clip(value), list.kind)
			}
		}
	}
	if r.Handler != "" && !slices.Contains(handlers, r.Handler) {
		wrong(".handler: %q is not configured; the handlers here are: %s", clip(r.Handler), strings.Join(handlers, ", "))
	}
	if !r.Format.known() {
		wrong(".format: %q is none of host, guest, never", clip(string(r.Format)))
	}
	if r.Annotated && r.Defer && len(r.RuntimeHandlers) == 0 {
		wrong(".annotated: anybody who may make a pod can write the annotation: name the runtimeHandlers whose pods may ask")
	}
	if !r.Defer && (r.Handler != "" || r.Format != FormatUnset) {
		wrong(": handler and format have no effect in a rule that does not defer: set defer: true, or take them out")
	}
	return found
}

// ruleList is one list of a rule, with what may stand in it.
type ruleList struct {
	key, kind string
	values    []string
	takes     func(string) bool
}

func (r *Rule) lists() []ruleList {
	modes := accessModes()
	return []ruleList{
		{"drivers", "a CSI driver's name, or one with * in it", r.Drivers, ruleDriverForm().MatchString},
		{"filesystems", "a filesystem's name", r.Filesystems, fsTypeForm().MatchString},
		{"runtimeHandlers", "a handler of a RuntimeClass", r.RuntimeHandlers, runtimeHandlerForm().MatchString},
		{"accessModes", "one of " + strings.Join(modes, ", "), r.AccessModes, func(m string) bool { return slices.Contains(modes, m) }},
	}
}

// compare sets a rule against those before it. Only one whole rule that covers it
// is found, not several that do so together.
func (p *Policy) compare(i int) []error {
	var found []error
	rule := &p.Rules[i]
	for n := range i {
		earlier := &p.Rules[n]
		if earlier.Name == rule.Name && rule.Name != "" {
			found = append(found, Errorf(Invalid, "%s.name: %s has the same name", rule.place(i), earlier.place(n)))
		}
		if earlier.covers(rule) {
			return append(found, Errorf(Invalid, "%s: it can never match, because %s stands before it and takes all that it "+
				"would: put it first, or take it out", rule.place(i), earlier.place(n)))
		}
	}
	return found
}

// covers tells whether all that another rule matches is matched by this one.
func (r *Rule) covers(other *Rule) bool {
	return (!r.Annotated || other.Annotated) && within(r.Drivers, other.Drivers, globMatches) && within(r.Filesystems, other.Filesystems, equal) &&
		within(r.RuntimeHandlers, other.RuntimeHandlers, equal) && within(r.AccessModes, other.AccessModes, equal)
}

func equal(a, b string) bool { return a == b }

// within tells whether each of the inner values is taken by one of the outer. For
// patterns, the inner one is matched as if it were a name: its * is no letter of
// any name, so only a * of the outer one takes it, and with it all it stands for.
func within(outer, inner []string, takes func(outer, inner string) bool) bool {
	if len(outer) == 0 || len(inner) == 0 {
		return len(outer) == 0
	}
	for _, value := range inner {
		if !slices.ContainsFunc(outer, func(o string) bool { return takes(o, value) }) {
			return false
		}
	}
	return true
}
