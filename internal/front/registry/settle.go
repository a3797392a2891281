package registry

import (
	"time"

	"go.uber.org/zap"
)

// settling decides for one session whether its registration is renewed because kubelet may
// lose it.
//
// When a socket goes, kubelet forgets the driver's name, and only then removes the
// driver from the CSINode, with retries against the API server. It accepts another
// socket of that driver as soon as the name is forgotten. So the removal that belongs
// to the old socket can come after the registration of the new one, and undo it.
// Kubelet does not report that, and does not try again.
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
	moved := s.moved && time.Since(s.registry.started) < s.registry.times.Unsettled
	s.moved = false
	_, left := s.registry.departures.Get(driver)
	s.registry.departures.Remove(driver)
	return left || moved
}

// beginRenewal logs and counts a renewal. The caller has the registration socket removed and
// made again. That has no such race: kubelet runs one operation at a time for a path, so it
// registers the new socket after it has finished the removal of the old one, and by now the
// removal for the other path has ended.
//
// It returns false while a socket of others is there: kubelet could register that one
// instead. When it goes, needed reports it.
func beginRenewal(r *Registry, driver string) bool {
	if r.directly()[driver] != "" {
		return false
	}
	r.cfg.Log.Info("a registration is renewed, because kubelet may have lost it", zap.String("driver", driver))
	if r.cfg.Renewed != nil {
		r.cfg.Renewed(driver)
	}
	return true
}
