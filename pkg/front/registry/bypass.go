package registry

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// bypass is a socket in kubelet's directory that is not ours: a driver behind it
// talks to kubelet past us.
type bypass struct {
	id     socketID
	cancel context.CancelFunc
	driver string // "" until it is known, and where it is no CSI driver
}

// followBypass asks each of them whose it is.
func (r *Registry) followBypass(ctx context.Context, found map[string]socketID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for path, one := range r.direct {
		if id, there := found[path]; !there || id != one.id {
			one.cancel()
			delete(r.direct, path)
		}
	}
	for path, id := range found {
		if r.direct[path] != nil {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		one := &bypass{id: id, cancel: cancel}
		r.direct[path] = one
		r.parts.Go(func() { r.askBypass(ctx, path, one) })
	}
}

// askBypass asks until there is an answer: a registrar may still be starting.
func (r *Registry) askBypass(ctx context.Context, path string, one *bypass) {
	asker := &session{registry: r, socket: path}
	for ctx.Err() == nil {
		info, err := asker.ask(ctx)
		if err == nil {
			r.noteBypass(path, one, info.Name)
			return
		}
		sleep(ctx, lastRetry)
	}
}

func (r *Registry) noteBypass(path string, one *bypass, driver string) {
	r.mu.Lock()
	one.driver = driver
	ours := r.names[driver] != nil || r.served[driver] != nil
	r.mu.Unlock()
	if !ours && !r.cfg.HasDeferred(driver) {
		return
	}
	r.cfg.Log.Error("a driver has registered with kubelet directly: its volumes are not deferred any more, and pods of "+
		"deferred volumes cannot be started; have its registrar use the registry of crust-proxy again",
		zap.String("driver", driver), zap.String("socket", path), zap.String("registry", r.cfg.Registry))
	if r.cfg.Alarm != nil {
		r.cfg.Alarm(driver)
	}
}

// Bypassed lists, for people, the drivers that talk to kubelet past us although
// they are ours or have deferred volumes.
func (r *Registry) Bypassed() map[string]string {
	out := make(map[string]string)
	r.mu.Lock()
	direct := make(map[string]string)
	for path, one := range r.direct {
		if one.driver != "" {
			direct[one.driver] = path
		}
	}
	ours := make(map[string]bool)
	for name := range r.names {
		ours[name] = true
	}
	for name := range r.served {
		ours[name] = true
	}
	r.mu.Unlock()
	for driver, path := range direct {
		if ours[driver] || r.cfg.HasDeferred(driver) {
			out[driver] = fmt.Sprintf("driver %s has registered with kubelet directly at %s: have its registrar use %s "+
				"(its hostPath was lost, perhaps by an upgrade)", driver, path, r.cfg.Registry)
		}
	}
	return out
}

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

// List tells of every registrar.
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
	return out
}

func (s *session) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := State{
		Driver: s.info, Registrar: s.socket, Ready: s.ready, Problem: s.problem, Since: s.since, Kubelet: s.kubelet,
	}
	if s.info.Name != "" {
		state.Socket = socketPath(s.registry.cfg.Sockets, s.info.Name)
	}
	return state
}

// clip keeps a hostile text from filling a log.
func clip(s string) string {
	const most = 512
	if len(s) > most {
		s = s[:most] + "..."
	}
	return s
}

var _ registration.RegistrationServer = (*offer)(nil)
