package top

import (
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Event is what changes a State.
type Event interface{ apply(*State) []Effect }

// Effect is what a State wants done outside.
type Effect interface{ effect() }

// Ask is an effect: ask the sandbox of a volume for fresh numbers.
type Ask struct{ ID string }

// Look is an effect: ask the daemon for what the watch does not tell.
type Look struct {
	// Health is set where handlers and drivers are wanted, too.
	Health bool
}

// Quit is an effect: end.
type Quit struct{}

// Suspend is an effect: give the terminal back to the shell for a while.
type Suspend struct{}

func (Ask) effect()     {}
func (Look) effect()    {}
func (Quit) effect()    {}
func (Suspend) effect() {}

// Watched is an event: what the watch told, in its order.
type Watched struct {
	Changes []*adminv1.WatchVolumesResponse
}

// Away is an event: the watch ended, and is tried again at a time.
type Away struct {
	At, Retry time.Time
	Reason    string
}

// Looked is an event: the answer to Look. A part that failed is nil.
type Looked struct {
	At       time.Time
	Node     *adminv1.GetNodeResponse
	Handlers []*adminv1.Handler
	Drivers  *adminv1.ListDriversResponse
	Volumes  []*adminv1.Volume
}

// Answered is an event: the answer to Ask.
type Answered struct {
	ID    string
	At    time.Time
	Took  time.Duration
	Reply *adminv1.GetVolumeStatsResponse
	// Failure is why there is no reply.
	Failure string
}

// Clock is an event: time goes on.
type Clock struct{ Now time.Time }

// Key is an event: a key, by its name, and the text that it would write.
type Key struct{ Name, Text string }

// Size is an event: the terminal's size.
type Size struct{ Width, Height int }

// Apply changes the state by an event and tells what it wants done.
func (s *State) Apply(e Event) []Effect { return e.apply(s) }

func (e Clock) apply(s *State) []Effect {
	s.now = e.Now
	return append(s.due(), s.wanted()...)
}

func (e Size) apply(s *State) []Effect {
	s.width, s.height = max(1, e.Width), max(1, e.Height)
	s.scroll()
	return s.due()
}
