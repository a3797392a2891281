package top

import (
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// slowest is how rarely a sandbox is asked that keeps failing.
const slowest = time.Minute

// ask is when a volume's sandbox was and will be asked.
type ask struct {
	under  bool
	since  time.Time // of the one under way
	next   time.Time
	failed int
}

// due are the questions to sandboxes for which it is time: only for what is on
// the screen, a few at a time, and ever more rarely for one that does not answer.
func (s *State) due() []Effect {
	if s.paused != nil || !s.link.synced {
		return nil
	}
	free := s.limit
	for _, a := range s.asks {
		if a.under {
			free--
		}
	}
	var effects []Effect
	for _, r := range s.onScreen() {
		if free <= 0 {
			return effects
		}
		if a := s.askOf(r.id()); s.live(r.id()) && !a.under && !s.now.Before(a.next) {
			a.under, a.since = true, s.now
			free--
			effects = append(effects, Ask{ID: r.id()})
		}
	}
	if 2*free >= s.limit && s.page == pageList {
		effects = append(effects, s.neverAsked()...)
	}
	return effects
}

// neverAsked is a question to one sandbox of which nothing is known, on the screen
// or not: else a full volume could stand at the end of the list for ever. It has
// its turn when at most half of the places are taken.
func (s *State) neverAsked() []Effect {
	for _, r := range s.list.rows {
		if r.asked || r.bytes.known || !s.live(r.id()) {
			continue
		}
		if a := s.askOf(r.id()); !a.under && !s.now.Before(a.next) {
			a.under, a.since = true, s.now
			return []Effect{Ask{ID: r.id()}}
		}
	}
	return nil
}

// live tells whether a volume is still there and has a sandbox to ask.
func (s *State) live(id string) bool {
	r := s.volumes[id]
	return r != nil && r.v.GetSandbox().GetId() != ""
}

func (s *State) askOf(id string) *ask {
	if s.asks[id] == nil {
		s.asks[id] = &ask{}
	}
	return s.asks[id]
}

// now asks a volume's sandbox at the next turn, whatever was before.
func (s *State) askNow(id string) []Effect {
	s.askOf(id).next = time.Time{}
	return s.due()
}

func (e Answered) apply(s *State) []Effect {
	old := s.volumes[e.ID]
	if old == nil {
		return s.due() // it went away meanwhile, and what was asked with it
	}
	a := s.askOf(e.ID)
	a.under = false
	if e.Reply == nil && !s.link.synced {
		return nil // it says nothing of the sandbox: the daemon is away
	}
	v := proto.CloneOf(old.v)
	v.StatsAt, v.StatsTook = timestamppb.New(e.At), durationpb.New(e.Took)
	v.StatsRequests++
	if e.Reply == nil {
		a.failed++
		v.StatsFailures++
		v.LastError, v.LastErrorAt = e.Failure, timestamppb.New(e.At)
	} else {
		a.failed = 0
		v.Usage, v.UsageAt, v.Condition = e.Reply.GetUsage(), v.GetStatsAt(), e.Reply.GetCondition()
		if v.GetState() != adminv1.VolumeState_VOLUME_STATE_DEGRADED {
			v.LastError, v.LastErrorAt = "", nil // it has gone right since
		}
	}
	a.next = e.At.Add(min(slowest, s.settings.Interval<<min(a.failed, 5)))
	s.put(s.derive(v))
	s.sample(e)
	s.rebuild()
	return s.due()
}
