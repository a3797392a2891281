package top

import (
	"cmp"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

const (
	// maxConcurrent is how many sandboxes are asked at once. It is far below what the
	// relay allows, so that kubelet's requests never wait for ours.
	maxConcurrent = 4
	// maxBackoff bounds the pause after failures of one sandbox.
	maxBackoff = time.Minute
)

// schedule decides when sandboxes are asked for fresh numbers, and the daemon for what the watch does not report.
type schedule struct {
	interval time.Duration
	limit    int // how many sandboxes may be asked at once
	fetching map[string]request

	polling  bool
	nextPoll time.Time
	// silent is since when the daemon has been asked and has not answered; zero if it has.
	silent time.Time
}

// request is when a volume's sandbox was and will be asked.
type request struct {
	since  time.Time // of the request in flight; zero without one
	next   time.Time
	failed int // in a row
}

// fetches starts the requests that are due: for the volumes on the screen, a few at a time,
// and less and less often for a sandbox that does not answer.
//
// While at most half of the slots are taken, it also starts one for a volume beyond the screen that was never asked:
// else a full volume could stay at the end of the list unnoticed.
func (s *schedule) fetches(now time.Time, onScreen, beyond []*row) (effects []Effect) {
	free := s.limit
	for _, q := range s.fetching {
		if !q.since.IsZero() {
			free--
		}
	}
	for _, r := range onScreen {
		if free > 0 && s.start(now, r) {
			free--
			effects = append(effects, FetchStats{ID: r.id()})
		}
	}
	if 2*free < s.limit {
		return effects
	}
	for _, r := range beyond {
		if !r.asked && r.bytes == nil && s.start(now, r) {
			return append(effects, FetchStats{ID: r.id()})
		}
	}
	return effects
}

// start marks a request as in flight, if the volume has a sandbox and it is time.
func (s *schedule) start(now time.Time, r *row) bool {
	q := s.fetching[r.id()]
	if !r.hasSandbox() || !q.since.IsZero() || now.Before(q.next) {
		return false
	}
	q.since = now
	s.fetching[r.id()] = q
	return true
}

// fetched ends a request. A failure that does not count changes no pause.
func (s *schedule) fetched(e StatsFetched, counts bool) {
	q := s.fetching[e.ID]
	q.since = time.Time{}
	if counts {
		q.failed = show.Either(e.Reply == nil, q.failed+1, 0)
		q.next = e.At.Add(max(s.interval, min(maxBackoff, s.interval<<min(q.failed, 5))))
	}
	s.fetching[e.ID] = q
}

func (s *schedule) fetchNow(id string) {
	q := s.fetching[id]
	q.next = time.Time{}
	s.fetching[id] = q
}

func (s *schedule) poll(now time.Time, eventsOf string) []Effect {
	if s.polling || now.Before(s.nextPoll) {
		return nil
	}
	s.polling = true
	s.silent = cmp.Or(s.silent, now)
	return []Effect{Poll{eventsOf}}
}

// polled ends a request to the daemon. concurrency is how many requests its relay allows at
// once: at most half of them are ours, the rest is for kubelet.
func (s *schedule) polled(e Polled, concurrency int) {
	s.polling = false
	s.nextPoll = e.At.Add(s.interval)
	s.silent = show.When(e.Unanswered, s.silent)
	if concurrency > 0 {
		s.limit = max(1, min(maxConcurrent, concurrency/2))
	}
}
