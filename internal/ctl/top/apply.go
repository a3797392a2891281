package top

import (
	"time"

	"google.golang.org/protobuf/proto"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func (e Watched) apply(s *State) []Effect {
	for _, change := range e.Changes {
		s.change(change)
	}
	s.rebuild()
	return append(s.due(), s.wanted()...)
}

func (s *State) change(change *adminv1.WatchVolumesResponse) {
	id := change.GetVolume().GetId()
	switch change.GetType() {
	case adminv1.WatchVolumesResponse_TYPE_SYNCED:
		s.synced()
	case adminv1.WatchVolumesResponse_TYPE_REMOVED:
		delete(s.volumes, id)
		delete(s.fresh, id)
		s.forget(id)
	case adminv1.WatchVolumesResponse_TYPE_CHANGED:
		s.put(s.derive(change.GetVolume()))
	}
}

// put takes a volume up. While a new watch lists what there is, the old picture
// stays, and what is new is added to it.
func (s *State) put(r *row) {
	s.volumes[r.id()] = r
	if s.fresh != nil {
		s.fresh[r.id()] = r
	}
	s.remember(r)
}

// synced ends the listing of a new watch: what it did not list has gone.
func (s *State) synced() {
	if s.fresh != nil {
		for id := range s.volumes {
			if s.fresh[id] == nil {
				s.forget(id)
			}
		}
		s.volumes, s.fresh = s.fresh, nil
	}
	s.link = link{synced: true, since: s.now}
	s.look.next, s.look.health = time.Time{}, time.Time{}
}

func (s *State) forget(id string) {
	delete(s.asks, id)
	delete(s.past, id)
}

func (e Away) apply(s *State) []Effect {
	since := e.At
	if s.link.away {
		since = s.link.since
	}
	s.link = link{away: true, since: since, retry: e.Retry, reason: s.clean(e.Reason)}
	s.fresh = make(map[string]*row)
	s.scroll() // the alert takes a line
	return nil
}

func (e Looked) apply(s *State) []Effect {
	s.look.under = false
	s.look.next = e.At.Add(s.settings.Interval)
	s.node.learn(s, e)
	for _, v := range e.Volumes {
		s.refresh(v)
	}
	s.rebuild()
	return s.due()
}

// clockSlack is how much later than the daemon we see an answer end.
const clockSlack = 500 * time.Millisecond

// refresh takes from a listing what the watch does not tell: numbers. The rest
// may be older than what the watch has told since.
func (s *State) refresh(v *adminv1.Volume) {
	old := s.volumes[v.GetId()]
	if old == nil {
		return
	}
	if timeOf(v.GetStatsAt()).Add(clockSlack).Before(timeOf(old.v.GetStatsAt())) {
		return // the listing is from before an answer
	}
	merged := proto.CloneOf(old.v)
	merged.Usage, merged.UsageAt, merged.Condition = v.GetUsage(), v.GetUsageAt(), v.GetCondition()
	merged.LastError, merged.LastErrorAt = v.GetLastError(), v.GetLastErrorAt()
	merged.StatsTook, merged.StatsAt = v.GetStatsTook(), v.GetStatsAt()
	merged.StatsRequests, merged.StatsFailures = v.GetStatsRequests(), v.GetStatsFailures()
	s.put(s.derive(merged))
}

// healthEvery is how often handlers and drivers are asked for.
const healthEvery = 15 * time.Second

// wanted asks the daemon anew when it is time.
func (s *State) wanted() []Effect {
	if !s.link.synced || s.look.under || s.paused != nil || s.now.Before(s.look.next) {
		return nil
	}
	s.look.under = true
	health := !s.now.Before(s.look.health)
	if health {
		s.look.health = s.now.Add(healthEvery)
	}
	return []Effect{Look{Health: health}}
}
