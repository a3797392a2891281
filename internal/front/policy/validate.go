package policy

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// maxRules bounds the rules, of which each pair is compared.
const maxRules = 1000

var (
	ruleDriverForm = sys.LazyRegexp(`^[A-Za-z0-9*]([A-Za-z0-9.*-]{0,61}[A-Za-z0-9*])?$`)
	rootModeForm   = sys.LazyRegexp(`^[02]?[0-7]{3}$`)
	classForm      = sys.LazyRegexp(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`) // a DNS subdomain
	ruleNameForm   = sys.LazyRegexp(`^[\p{L}\p{N}][\p{L}\p{N} ._/-]{0,62}$`)
)

// Validate returns everything that is wrong with a policy. The handlers are the names of the configured ones.
func (p *Policy) Validate(handlers []string) error {
	if len(p.Rules) > maxRules {
		return volume.Errorf(volume.Invalid, "policy.rules: %d rules are more than the %d that are taken", len(p.Rules), maxRules)
	}
	var found []error
	if !isFormat(p.Format) {
		found = append(found, volume.Errorf(volume.Invalid, "policy.format: %q is none of host, guest, never", sys.Clip(string(p.Format))))
	}
	for i := range p.Rules {
		found = append(found, p.Rules[i].problems(i, handlers)...)
		found = append(found, p.compare(i)...)
		if why := p.unserved(&p.Rules[i]); len(why) > 0 && len(why) == len(p.Rules[i].RuntimeHandlers) {
			found = append(found, volume.Errorf(volume.Invalid, "%s.runtimeHandlers: %s", p.Rules[i].configPath(i), why[0]))
		}
	}
	return errors.Join(found...)
}

func isFormat(f volume.FormatPolicy) bool {
	return slices.Contains([]volume.FormatPolicy{volume.FormatUnset, volume.FormatHost, volume.FormatGuest, volume.FormatNever}, f)
}

func (r *Rule) problems(i int, handlers []string) (found []error) {
	wrong := func(format string, args ...any) {
		found = append(found, volume.Errorf(volume.Invalid, "%s"+format, append([]any{r.configPath(i)}, args...)...))
	}
	if !ruleNameForm().MatchString(r.Name) {
		wrong(".name: it is empty, longer than 63 characters, or not of letters, digits, spaces and ._/-: " +
			"records and errors name the rule by it")
	}
	for _, c := range r.conditions(&Input{})[1:] { // all but annotated
		for n, value := range c.list {
			if !c.valid(value) {
				wrong(".%s[%d]: %q is not %s", c.key, n, sys.Clip(value), c.kind)
			}
		}
	}
	if r.Handler != "" && !slices.Contains(handlers, r.Handler) {
		wrong(".handler: %q is not configured; the handlers here are: %s", sys.Clip(r.Handler), cmp.Or(strings.Join(handlers, ", "), "none"))
	}
	r.checkWords(wrong)
	if r.Annotated && r.Defer && len(r.RuntimeHandlers) == 0 {
		wrong(".annotated: anybody who may make a pod can write the annotation: name the runtimeHandlers whose pods may ask")
	}
	if len(r.MkfsOptions) > 0 && len(r.Filesystems) != 1 {
		wrong(".mkfsOptions: each mkfs has its own: name one filesystem in filesystems")
	}
	return found
}

func (r *Rule) checkWords(wrong func(format string, args ...any)) {
	if !isFormat(r.Format) {
		wrong(".format: %q is none of host, guest, never", sys.Clip(string(r.Format)))
	}
	if !slices.Contains([]ThenOnHost{"", HostAllowed, HostRefused}, r.ThenOnHost) {
		wrong(".thenOnHost: %q is none of allow, refuse", sys.Clip(string(r.ThenOnHost)))
	}
	if !r.Defer && (r.Handler != "" || r.Format != volume.FormatUnset || len(r.MkfsOptions) > 0 || r.RootMode != "" || r.ThenOnHost != "") {
		wrong(": handler, format, mkfsOptions, rootMode and thenOnHost have no effect in a rule that does not defer: set defer: true, or remove them")
	}
	if r.RootMode != "" && (!rootModeForm().MatchString(r.RootMode) || strings.Trim(r.RootMode, "0") == "") {
		wrong(".rootMode: %q is not of the form \"0775\" or \"2775\": permissions in octal, in quotes, with the setgid bit at the most",
			sys.Clip(r.RootMode))
	}
}

// compare compares a rule with those before it. It finds one earlier rule that covers it, not
// several that do so together.
func (p *Policy) compare(i int) (found []error) {
	rule := &p.Rules[i]
	for n := range i {
		earlier := &p.Rules[n]
		if earlier.Name == rule.Name && rule.Name != "" {
			found = append(found, volume.Errorf(volume.Invalid, "%s.name: %s has the same name", rule.configPath(i), earlier.configPath(n)))
		}
		if earlier.covers(rule) {
			return append(found, volume.Errorf(volume.Invalid, "%s: it can never match, because %s stands before it and takes all that it "+
				"would: put it first, or take it out", rule.configPath(i), earlier.configPath(n)))
		}
	}
	return found
}

// covers reports whether this rule matches all that another one matches.
func (r *Rule) covers(other *Rule) bool {
	return (!r.Annotated || other.Annotated) && within(r.Drivers, other.Drivers, globMatches) && within(r.Filesystems, other.Filesystems, equal) &&
		within(r.RuntimeHandlers, other.RuntimeHandlers, equal) && within(expandModes(r.AccessModes), expandModes(other.AccessModes), equal) &&
		within(r.Namespaces, other.Namespaces, equal) && within(r.StorageClasses, other.StorageClasses, equal) && within(r.Needs, other.Needs, equal)
}

func equal(a, b string) bool { return a == b }

// within reports whether each of the inner values is matched by one of the outer ones. An
// inner pattern is matched as if it were a name: no name has a * in it, so only a * of the
// outer pattern matches the inner *, and then also all that the inner * stands for.
func within(outer, inner []string, matches func(outer, inner string) bool) bool {
	if len(outer) == 0 || len(inner) == 0 {
		return len(outer) == 0
	}
	for _, value := range inner {
		if !slices.ContainsFunc(outer, func(o string) bool { return matches(o, value) }) {
			return false
		}
	}
	return true
}

// Explain returns lines that explain the access modes in the rules, and then which runtime
// handlers of a rule cannot have deferred volumes although others of the same rule can.
func (p *Policy) Explain() []string {
	var modes, runtimes []string
	for i := range p.Rules {
		rule := &p.Rules[i]
		for _, word := range rule.AccessModes {
			if text := explainMode(word); text != "" {
				modes = append(modes, rule.configPath(i)+".accessModes: "+text)
			}
		}
		for _, why := range p.unserved(rule) {
			runtimes = append(runtimes, rule.configPath(i)+".runtimeHandlers: "+why)
		}
	}
	return append(modes, runtimes...)
}
