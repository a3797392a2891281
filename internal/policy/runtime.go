package policy

import (
	"cmp"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Runtime says which of our handlers serves the pods of some runtime handlers, as
// RuntimeClasses name them.
type Runtime struct {
	// Pattern is a RuntimeClass's handler, or a pattern in which * stands for any
	// characters.
	Pattern string
	// Handler is ours.
	Handler string
	// Refuse says why such pods cannot have a deferred volume; empty where they can.
	Refuse string
}

// runtimeOf gives the first entry that matches a pod's runtime handler, or nil.
func (p *Policy) runtimeOf(handler string) *Runtime {
	for i := range p.Runtimes {
		if globMatches(p.Runtimes[i].Pattern, handler) {
			return &p.Runtimes[i]
		}
	}
	return nil
}

// servedBy gives our handler for the pods of a runtime handler, where a rule may name
// one, or says why there is none. A volume that is handed to another handler than its
// runtime's would never reach the pod.
func (p *Policy) servedBy(runtime, named string) (handler, why string) {
	known := p.runtimeOf(runtime)
	switch {
	case known == nil:
		return named, ""
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

// handlerFor gives our handler for a volume that is deferred: that of the pod's
// runtime where it is known, else the one that the rule names, else none.
func (p *Policy) handlerFor(w *Input, rule, named string) (string, error) {
	if !w.RuntimeHandlerKnown {
		return named, nil
	}
	handler, why := p.servedBy(w.RuntimeHandler, named)
	if why != "" {
		return "", volume.Errorf(volume.Unsupported, "this volume of driver %s is to be deferred (%s), and %s", sys.Clip(w.Driver), rule, why)
	}
	return handler, nil
}

// noServedHandler says why none of the runtime handlers that a rule names can be served,
// or nothing where one can.
func (p *Policy) noServedHandler(r *Rule) (why string) {
	if !r.Defer {
		return ""
	}
	for _, runtime := range r.RuntimeHandlers {
		_, not := p.servedBy(runtime, r.Handler)
		if not == "" {
			return ""
		}
		why = cmp.Or(why, not)
	}
	return why
}
