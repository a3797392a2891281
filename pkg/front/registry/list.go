package registry

import (
	"cmp"
	"slices"
	"time"
)

// State is a driver as `crustctl drivers` shows it.
type State struct {
	Driver
	// Registrar is the registrar's socket, and Socket the CSI socket of ours.
	Registrar string
	Socket    string
	Ready     bool
	Problem   string
	Since     time.Time
	// Kubelet is kubelet's word.
	Kubelet string
	// Bypassed is set where the driver talks to kubelet past us.
	Bypassed bool
}

// List tells of every registrar, by the driver's name; also of those that are
// refused.
func (r *Registry) List() []State {
	bypassed := r.Bypassed()
	r.mu.Lock()
	sessions := make([]*session, 0, len(r.sessions))
	for _, one := range r.sessions {
		sessions = append(sessions, one)
	}
	r.mu.Unlock()
	out := make([]State, 0, len(sessions))
	for _, one := range sessions {
		state := one.state()
		_, state.Bypassed = bypassed[state.Name]
		out = append(out, state)
	}
	slices.SortFunc(out, func(a, b State) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Registrar, b.Registrar))
	})
	return out
}

func (s *session) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := State{
		Driver: s.info, Registrar: s.socket, Ready: s.ready, Problem: s.problem, Since: s.since, Kubelet: s.kubelet,
	}
	if s.ready {
		state.Socket = socketPath(s.registry.cfg.Sockets, s.info.Name)
	}
	return state
}
