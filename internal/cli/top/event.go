package top

import (
	"time"

	tea "charm.land/bubbletea/v2"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

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
	At       time.Time
	Node     *adminv1.GetNodeResponse
	Handlers []*adminv1.Handler
	Drivers  *adminv1.ListDriversResponse
	Volumes  []*adminv1.Volume
}

// StatsFetched is the answer to FetchStats.
type StatsFetched struct {
	ID    string
	At    time.Time
	Took  time.Duration
	Reply *adminv1.GetVolumeStatsResponse
	// Failure is why there is no reply.
	Failure string
}

// Clock reports the time.
type Clock struct{ Now time.Time }

// Key is a key by its name, and the text that it types.
type Key struct{ Name, Text string }

// String is the key's name, by which bindings match.
func (k Key) String() string { return k.Name }

// Size is the terminal's size.
type Size = tea.WindowSizeMsg

// Effect is what a State wants done outside: FetchStats, Poll, Quit or Suspend.
type Effect any

// FetchStats asks the sandbox of a volume for fresh numbers.
type FetchStats struct{ ID string }

// Poll asks the daemon for what the watch does not report.
type Poll struct {
	// Health asks for the node, handlers and drivers, too.
	Health bool
}

// Quit ends the program; Suspend gives the terminal back to the shell until the user
// resumes it.
type (
	Quit    = tea.QuitMsg
	Suspend = tea.SuspendMsg
)
