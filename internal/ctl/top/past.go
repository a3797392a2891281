package top

import (
	"time"
)

// What is kept of a volume's past, while top looks.
const (
	mostErrors  = 5
	mostSamples = 60
)

// past is what was seen of a volume.
type past struct {
	errors []pastError // the newest first
	took   []sample
}

// pastError is an error and when it was seen.
type pastError struct {
	text        string
	first, last time.Time
	times       int
}

// sample is one request for stats.
type sample struct {
	took   time.Duration
	failed bool
}

func (s *State) pastOf(id string) *past {
	if s.past[id] == nil {
		s.past[id] = &past{}
	}
	return s.past[id]
}

// remember keeps the error that a volume shows, once for each time that it
// happened.
func (s *State) remember(r *row) {
	if r.err == "" {
		return
	}
	at, again := timeOf(r.v.GetLastErrorAt()), 1
	if at.IsZero() {
		at, again = s.now, 0 // a condition lasts, and has no time of its own
	}
	p := s.pastOf(r.id())
	if len(p.errors) > 0 && p.errors[0].text == r.err {
		if newest := &p.errors[0]; at.After(newest.last) {
			newest.last = at
			newest.times += again
		}
		return
	}
	p.errors = append([]pastError{{text: r.err, first: at, last: at, times: 1}}, p.errors...)
	p.errors = p.errors[:min(len(p.errors), mostErrors)]
}

// sample keeps how long an answer took.
func (s *State) sample(e Answered) {
	p := s.pastOf(e.ID)
	p.took = append(p.took, sample{took: e.Took, failed: e.Reply == nil})
	p.took = p.took[max(0, len(p.took)-mostSamples):]
}

// seen is the past of a volume, for who only looks.
func (s *State) seen(id string) past {
	if p := s.past[id]; p != nil {
		return *p
	}
	return past{}
}
