// Package top is the live view of a node's volumes. Its picture is a function of
// a State, and a State changes by events only: what a key does, or what the daemon
// says, can be tested without a terminal or a daemon.
package top

import (
	"time"
)

// DefaultInterval is how often a volume's sandbox is asked for fresh numbers.
const DefaultInterval = 5 * time.Second

// Settings are what the user chose and what the terminal can show.
type Settings struct {
	// Interval is the least time between two requests to one sandbox.
	Interval time.Duration
	// Sort is the order at first.
	Sort Order
	// Filter is the filter at first.
	Filter string
	// State shows only volumes in one state; empty is all. It is a name as rows
	// show it.
	State string
	// Driver and Handler show only their volumes; the daemon selects them.
	Driver, Handler string
	// ASCII keeps to ASCII, Plain leaves out all colours and attributes.
	ASCII, Plain bool
	// Host is the node's name, where the daemon's configuration has none.
	Host string
}

// atOnce is how many sandboxes are asked at once. It is far below what the relay
// takes, so that kubelet's questions never wait for ours.
const atOnce = 4

// State is all that a picture is made of.
type State struct {
	settings Settings
	now      time.Time

	volumes map[string]*row
	// fresh holds what a new watch has listed up to now, until it is whole.
	fresh map[string]*row
	// paused is the picture of the moment in which the user stopped it.
	paused map[string]*row
	asks   map[string]*ask
	past   map[string]*past

	node nodeInfo
	link link
	look looking

	list   list
	detail detail
	page   page
	order  Order
	up     bool // the order is turned round
	filter string
	input  *string // what is being typed as a filter, while it is
	limit  int     // how many sandboxes may be asked at once

	width, height int
}

type page uint8

const (
	pageList page = iota
	pageDetail
	pageHelp
)

// list is what the list of volumes shows.
type list struct {
	rows    []*row
	known   int // the volumes before the filter
	natural [columnCount]int
	cursor  int
	top     int    // the first row that is on the screen
	chosen  string // the volume that the cursor stays on; empty is none
}

// detail is what the page of one volume shows.
type detail struct {
	id   string
	top  int
	from page // where escape leads back to
}

// link is the state of the watch.
type link struct {
	synced bool
	away   bool
	since  time.Time
	retry  time.Time
	reason string
}

// looking is when the daemon was asked for what the watch does not tell.
type looking struct {
	under  bool
	next   time.Time
	health time.Time
}

// New is the state before anything is known.
func New(s Settings, now time.Time) *State {
	return &State{
		settings: s, now: now, limit: atOnce, order: s.Sort, filter: s.Filter,
		volumes: make(map[string]*row), fresh: make(map[string]*row),
		asks: make(map[string]*ask), past: make(map[string]*past),
		link: link{since: now}, width: 80, height: 24,
	}
}

// picture is what is shown: all that is known, or what was when the user
// stopped it.
func (s *State) picture() map[string]*row {
	if s.paused != nil {
		return s.paused
	}
	return s.volumes
}
