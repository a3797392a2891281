package policy

import (
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Runtime maps runtime handlers, as RuntimeClasses name them, to the handler of ours that serves their pods.
type Runtime struct {
	// Pattern is a RuntimeClass's handler, or a pattern in which * stands for any characters.
	Pattern string
	// Handler is ours.
	Handler string
	// Refuse is why such pods cannot have a deferred volume; empty if they can.
	Refuse string
}

// servedBy returns our handler for the pods of a runtime handler, or why there is none. The rule may name one, which
// must be the same: a volume that is handed to another handler than its runtime's would never reach the pod.
func (p *Policy) servedBy(runtime, named string) (handler, why string) {
	i := slices.IndexFunc(p.Runtimes, func(r Runtime) bool { return globMatches(r.Pattern, runtime) })
	if i < 0 {
		return named, ""
	}
	switch known := p.Runtimes[i]; {
	case known.Refuse != "":
		return "", "pods of " + runtimeText(runtime) + " cannot have a deferred volume: " + known.Refuse +
			"; exclude them by a rule with defer: false, or set policy.runtimes for " + known.Pattern
	case named != "" && named != known.Handler:
		return "", "pods of " + runtimeText(runtime) + " belong to the handler " + known.Handler + ", and the rule says handler: " + named +
			"; take handler out of the rule, or set policy.runtimes for " + known.Pattern
	default:
		return known.Handler, ""
	}
}

// withHandler sets the handler of a verdict to that of the pod's runtime, if the runtime is known.
func (p *Policy) withHandler(v Verdict, w *Input) (Verdict, error) {
	if !w.PodKnown {
		return v, nil
	}
	handler, why := p.servedBy(w.RuntimeHandler, v.Handler)
	if why != "" {
		return Verdict{Rule: v.Rule, Passed: v.Passed}, volume.Errorf(volume.Unsupported, "this volume of driver %s is to be deferred (%s), and %s",
			sys.Clip(w.Driver), v.Rule, why)
	}
	v.Handler = handler
	return v, nil
}

// unserved returns why, for each runtime handler of a rule that cannot be served.
func (p *Policy) unserved(r *Rule) (why []string) {
	for _, runtime := range r.RuntimeHandlers {
		if _, not := p.servedBy(runtime, r.Handler); r.Defer && not != "" {
			why = append(why, not)
		}
	}
	return why
}
