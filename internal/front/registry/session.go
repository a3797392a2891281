package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// session follows one registrar from when its socket appears until the socket has gone.
type session struct {
	registry *Registry
	socket   string
	id       socketID
	begun    time.Time
	from     string // what its process runs in; guarded by the registry's lock
	cancel   context.CancelFunc
	renew    chan struct{} // has the registration with kubelet made again
	scanned  chan struct{} // kubelet's directory may have changed
	notified string        // the last error that the registrar got; of run alone
	settling settling      // of run alone

	confirmed atomic.Pointer[time.Time] // when kubelet confirmed the registration, or nil

	mu  sync.Mutex
	now State // what the session knows of it
}

// run retries until the driver is registered, and returns when the socket has gone.
func (s *session) run(ctx context.Context) {
	wait := s.registry.times.firstRetry
	untold := time.Now().Add(s.registry.times.untold)
	for {
		err := s.attempt(ctx)
		if ctx.Err() != nil {
			return
		}
		s.setProblem(err)
		var refused refusal
		var taken errTaken
		if errors.As(err, &taken) || errors.As(err, &refused) || time.Now().After(untold) {
			// The registrar is notified once for each reason. It then exits, and its container is started again.
			if text := err.Error(); text != s.notified && s.notify(ctx, &registration.RegistrationStatus{Error: text}) {
				s.notified = text
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-taken.changed:
		case <-time.After(wait):
		}
		wait = min(2*wait, s.registry.times.lastRetry)
	}
}

// attempt checks the driver, serves it and registers it with kubelet. It returns an error, or when ctx ends.
func (s *session) attempt(ctx context.Context) error {
	answer, err := s.registry.check.info(ctx, s.socket)
	if err != nil && s.notified != "" { // it has exited, as it does
		err = fmt.Errorf("%w; it was refused before: %s", err, s.notified)
	}
	if err != nil {
		return err
	}
	info, err := s.registry.check.accept(s.socket, answer)
	if err != nil {
		s.setInfo(claimed(answer))
		return err
	}
	s.setInfo(info)
	if err := s.reserve(ctx, info); err != nil {
		return err
	}
	defer s.release(info.Name)
	front, err := s.serve(ctx, info)
	if err != nil {
		return err
	}
	return s.register(ctx, front)
}

// reserve reserves the driver's name for this session. It waits for the session of a
// registrar that has just gone: that is usually the same registrar before a restart.
func (s *session) reserve(ctx context.Context, info *Driver) error {
	r := s.registry
	asking, cancel := context.WithTimeout(ctx, r.times.call)
	defer cancel()
	from := r.whose(asking, s.socket)
	for ctx.Err() == nil {
		r.mu.Lock()
		other, changed := r.names[info.Name], r.changed
		if s.from = from; other == nil && r.hasMany(from) {
			r.mu.Unlock()
			return refusef("driver %s: the container or service behind %s has registered %d drivers already, which is the limit", info.Name, s.socket, mostNames)
		}
		if other == nil {
			r.names[info.Name] = s
		}
		gone := other != nil && r.sessions[other.socket] != other
		r.mu.Unlock()
		switch {
		case other == nil:
			sys.Wake(r.due) // others may have registered it with kubelet directly
			return nil
		case !gone:
			return errTaken{changed: changed, error: fmt.Errorf("the driver %s is registered by %s already, with the endpoint %s: "+
				"%s, with the endpoint %s, is not taken until that one has gone",
				info.Name, other.socket, other.state().Endpoint, s.socket, info.Endpoint)}
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
	return ctx.Err()
}

func (s *session) release(name string) {
	r := s.registry
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, name)
	r.left.Add(name, time.Now(), math.MaxInt64)
	close(r.changed)
	r.changed = make(chan struct{})
}

// serve connects the driver's CSI socket to the driver, once that has proved to be the right
// one. What fails before a registration must not keep kubelet from the volumes that there are.
func (s *session) serve(ctx context.Context, info *Driver) (*served, error) {
	link, err := s.registry.reach(info)
	if err != nil {
		return nil, err
	}
	known, err := s.registry.check.identify(ctx, link.conn, *info)
	var front *served
	if err == nil {
		front, err = s.registry.serve(known, link)
	}
	if err != nil {
		s.registry.drop(info.Name, link)
		return nil, err
	}
	s.setInfo(known)
	return front, nil
}

// notify sends a verdict to the registrar, and reports whether the registrar got it.
func (s *session) notify(ctx context.Context, verdict *registration.RegistrationStatus) bool {
	conn, err := dial(s.socket, sys.DialUnix)
	if err == nil {
		defer func() { _ = conn.Close() }()
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.registry.times.call)
		defer cancel()
		_, err = registration.NewRegistrationClient(conn).NotifyRegistrationStatus(ctx, verdict)
	}
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		s.registry.cfg.Log.Warn("a registrar could not be told how it went", zap.String("socket", s.socket), zap.String("problem", clip(err.Error())))
	}
	return err == nil
}

func (s *session) update(change func(now *State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.now)
}

func (s *session) setInfo(info *Driver) { s.update(func(now *State) { now.Driver = *info }) }

// registered begins the state of a driver that kubelet has registered, and refusedBy of one that it has not.
const (
	registered = "registered"
	refusedBy  = "refused: "
)

func (s *session) setKubelet(text string) {
	s.update(func(now *State) {
		now.Kubelet = clip(text)
		if strings.HasPrefix(text, registered) {
			now.Waiting = time.Time{}
		} else if now.Waiting.IsZero() {
			now.Waiting = time.Now()
		}
	})
}

// setUnoffered is called when no registration socket can be made.
func (s *session) setUnoffered(err error) {
	text := "not registered anew: " + err.Error()
	if errors.Is(err, fs.ErrNotExist) {
		text = "kubelet's registry " + s.registry.cfg.KubeletRegistry + " is not there yet"
	}
	if s.state().Kubelet != clip(text) {
		s.setKubelet(text)
		s.registry.cfg.Log.Warn("a driver cannot be registered with kubelet now", zap.String("socket", s.socket), zap.String("problem", text))
	}
}

func (s *session) setProblem(err error) {
	s.update(func(now *State) {
		if now.Ready {
			now.Since = time.Now()
		}
		if text := clip(err.Error()); now.Ready || now.Problem != text {
			now.Ready, now.Problem = false, text
			s.registry.cfg.Log.Warn("a driver is not ready", zap.String("socket", s.socket), zap.String("problem", text))
		}
	})
}

func (s *session) setReady(info *Driver) {
	s.update(func(now *State) {
		now.Driver = *info
		if now.Ready {
			return
		}
		now.Ready, now.Problem, now.Since = true, "", time.Now()
		s.registry.cfg.Log.Info("a driver is ready", zap.String("driver", info.Name), zap.String("version", info.Version),
			zap.String("endpoint", info.Endpoint), zap.String("socket", s.socket))
	})
}

func (s *session) registerAgain() { sys.Wake(s.renew) }

func (s *session) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := s.now
	if state.Ready {
		state.Socket = socketPath(s.registry.cfg.Sockets, state.Name)
	}
	return state
}

// settling decides for one session whether its registration is renewed because kubelet may lose it.
//
// When a socket goes, kubelet forgets the driver's name, and only then removes the driver from the CSINode, with
// retries against the API server. It accepts another socket of that driver as soon as the name is forgotten. So the
// removal that belongs to the old socket can come after the registration of the new one, and undo it. Kubelet does not
// report that, and does not try again.
type settling struct {
	registry *Registry
	begun    bool
	moved    bool // kubelet may have had the driver at another socket until now
}

// begin must be called before each offer. If a socket of ours is there before the first one,
// kubelet had no other socket of the driver.
func (s *settling) begin(path string) {
	if !s.begun {
		s.begun, s.moved = true, idAt(path) == socketID{}
	}
}

// needed must be called once for each registration. It reports each event once: a
// socket of others went, or the driver may have moved before the daemon started.
func (s *settling) needed(driver string) bool {
	moved := s.moved && time.Since(s.registry.started) < s.registry.times.unsettled
	s.moved = false
	_, left := s.registry.departures.Get(driver)
	s.registry.departures.Remove(driver)
	return left || moved
}

// beginRenewal logs and counts a renewal. The caller has the registration socket made again. That has no such race:
// kubelet runs one operation at a time for a path, so it registers the new socket after it has finished the removal of
// the old one, and by now the removal for the other path has ended.
//
// It returns false while a socket of others is there: kubelet could register that one
// instead. When it goes, needed reports it.
func beginRenewal(r *Registry, driver string) bool {
	if r.directly()[driver] != "" {
		return false
	}
	r.cfg.Log.Info("a registration is renewed, because kubelet may have lost it", zap.String("driver", driver))
	r.cfg.Metrics.RegistrationRenewed(driver)
	return true
}
