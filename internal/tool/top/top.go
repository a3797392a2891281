// Package top is the live view of a node's volumes. A State changes by events only, and the screen is a function of the
// State: keys and what the daemon reports can be tested without a terminal or a daemon.
package top

import (
	"maps"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// DefaultInterval is how often a volume's sandbox is asked for fresh numbers.
const DefaultInterval = 5 * time.Second

// Settings are what the user chose and what the terminal can show.
type Settings struct {
	Interval        time.Duration // the least time between two requests to one sandbox
	Sort            Order         // at first
	Filter          string        // at first
	State           string        // selects the volumes in one state, by its name in a row; empty is all
	Driver, Handler string        // select their volumes; the daemon does it
	ASCII, Plain    bool          // draw with ASCII only; without colours and attributes
	Host            string        // the node's name if the daemon's configuration has none
}

// State is everything that the screen shows: what is known of the node, and what the user chose to see of it.
type State struct {
	settings Settings
	now      time.Time
	node     node
	schedule schedule
	// paused holds the volumes as they were when the user paused; nil when not paused.
	paused map[string]*row
	list   list
	detail detail
	page   page
	back   page // the page below the help
	canvas canvas
}

type page uint8

const (
	pageList page = iota
	pageDetail
	pageHelp
)

type detail struct {
	id  string
	top int // the first line on the screen
	// events are what happened to the volume, the newest first.
	events []*adminv1.VolumeEvent
}

func (d *detail) polled(e Polled) {
	if e.EventsOf == d.id && e.Events != nil {
		d.events = e.Events
	}
}

// New is the state before anything is known.
func New(s Settings, now time.Time) *State {
	c := canvas{charset: unicodeCharset, width: 80, height: 24, plain: s.Plain}
	if s.ASCII {
		c.charset = asciiCharset
	}
	known := node{
		escape: c.escape, volumes: make(map[string]*row), unlisted: make(map[string]bool),
		daemon: daemonInfo{host: c.escape(s.Host)}, link: link{since: now},
	}
	return &State{
		settings: s, now: now, node: known, canvas: c,
		schedule: schedule{interval: s.Interval, limit: maxConcurrent, fetching: make(map[string]request)},
		list:     list{order: s.Sort, filter: filter{text: s.Filter}},
	}
}

// Apply changes the state by an event and returns what has to be done outside.
func (s *State) Apply(e Event) []Effect {
	switch e := e.(type) {
	case Clock:
		s.now = e.Now
	case Size:
		s.canvas.width, s.canvas.height = max(1, e.Width), max(1, e.Height)
	case Key:
		if effect := s.key(e); effect != nil {
			return []Effect{effect}
		}
	case Watched:
		if s.node.watched(e, s.now) {
			s.schedule.nextPoll, s.schedule.silent = time.Time{}, time.Time{} // the daemon has just answered
		}
	case Disconnected:
		s.node.disconnected(e)
	case Polled:
		s.node.polled(e, s.now)
		s.schedule.polled(e, s.node.daemon.concurrency)
		s.detail.polled(e)
	case StatsFetched:
		s.fetched(e)
	}
	s.list.rebuild(s.shown(), s.settings.State)
	s.list.scroll(s.frame().rows)
	return s.requests()
}

func (s *State) fetched(e StatsFetched) {
	// A failure while the daemon is away or hangs says nothing about the sandbox.
	counts := e.Reply != nil || s.node.link.synced && (!e.Unanswered || !s.hangs())
	s.schedule.fetched(e, counts)
	if counts {
		s.node.fetched(e, s.now)
	}
}

// requests are the requests for which it is time. Nobody is asked while the screen is paused or the daemon is away.
func (s *State) requests() []Effect {
	if s.paused != nil || !s.node.link.synced {
		return nil
	}
	maps.DeleteFunc(s.schedule.fetching, func(id string, _ request) bool { return s.node.volumes[id] == nil })
	beyond := show.When(s.page == pageList, s.list.rows)
	return append(s.schedule.fetches(s.now, s.onScreen(), beyond), s.schedule.poll(s.now, show.When(s.page == pageDetail, s.detail.id))...)
}

// hangTime is after how long without an answer the daemon is said to hang. The watch does not end while it does.
const hangTime = 5 * time.Second

func (s *State) hangs() bool {
	return s.node.link.synced && !s.schedule.silent.IsZero() && s.now.Sub(s.schedule.silent) >= hangTime
}

func (s *State) old() bool { return s.node.link.away || s.hangs() }

// shown are the volumes as of now, or as of the moment of the pause.
func (s *State) shown() map[string]*row {
	return show.Either(s.paused != nil, s.paused, s.node.volumes)
}

func (s *State) onScreen() []*row {
	switch s.page {
	case pageList:
		return s.list.visible(s.frame().rows)
	case pageDetail:
		if r := s.shown()[s.detail.id]; r != nil {
			return []*row{r}
		}
	}
	return nil
}

// pause freezes the volumes on the screen, or shows them as they are again.
func (s *State) pause() { s.paused = show.When(s.paused == nil, maps.Clone(s.node.volumes)) }

// open shows the volume under the cursor, with fresh numbers.
func (s *State) open() {
	if r := s.list.current(); r != nil {
		s.list.chosen = r.id()
		s.page, s.detail = pageDetail, detail{id: r.id()}
		s.schedule.fetchNow(r.id())
		s.schedule.nextPoll = time.Time{}
	}
}

func (s *State) scroll(lines int) {
	p := newSheet(s)
	s.detail.top = max(0, min(s.detail.top+lines, len(p.content())-p.height()))
}

// Event is what changes a State: Size, Key, or one of the reports below.
type Event = tea.Msg

// Watched reports changes from the watch, in their order.
type Watched struct {
	Changes []*adminv1.WatchVolumesResponse
}

// Disconnected reports that the watch ended, and when it is tried again.
type Disconnected struct {
	At, Retry time.Time
	Reason    string
}

// Polled is the answer to Poll. A part that failed is nil.
type Polled struct {
	At time.Time
	// Unanswered: the daemon did not answer in time.
	Unanswered bool

	Node     *adminv1.GetNodeResponse
	Handlers []*adminv1.Handler
	Drivers  *adminv1.ListDriversResponse
	Volumes  []*adminv1.Volume
	// Events are those of the volume that Poll named, whose id is EventsOf.
	Events   []*adminv1.VolumeEvent
	EventsOf string
}

// StatsFetched is the answer to FetchStats.
type StatsFetched struct {
	ID      string
	At      time.Time
	Took    time.Duration
	Reply   *adminv1.GetVolumeStatsResponse
	Failure string
	// Unanswered: the daemon did not answer in time.
	Unanswered bool
}

// Clock reports the time.
type Clock struct{ Now time.Time }

// Key is a key by its name, and the text that it types.
type Key struct{ Name, Text string }

// Size is the terminal's size.
type Size = tea.WindowSizeMsg

// Effect is what a State wants done outside: FetchStats, Poll, Quit or Suspend.
type Effect any

// FetchStats asks the sandbox of a volume for fresh numbers.
type FetchStats struct{ ID string }

// Poll asks the daemon for what the watch does not report, and for the events of a volume if its details are shown.
type Poll struct{ EventsOf string }

// Quit ends the program.
type Quit = tea.QuitMsg

// Suspend gives the terminal back to the shell until the user resumes the program.
type Suspend = tea.SuspendMsg
