package driver

import (
	"fmt"
	"maps"
	"time"
)

// record is what is kept of a volume.
type record struct {
	Version  int       `json:"version"`
	ID       string    `json:"id"`
	Capacity int64     `json:"capacity"`
	Created  time.Time `json:"created"`
	// Ready is set while the image is there: not before it was made, and no more
	// when it is about to be removed.
	Ready bool `json:"ready"`
	// Ephemeral volumes live as long as their one publish.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Source is what the image was made from; a volume without one began blank.
	Source source `json:"source,omitzero"`
	// Snapshot is set where this is one and no volume.
	Snapshot *snapshot `json:"snapshot,omitempty"`
	// Volumes are the sources of a group of snapshots, in order; only its record has them.
	Volumes []string `json:"volumes,omitempty"`
	// Buffered: its loop devices use the node's page cache.
	Buffered bool `json:"buffered,omitempty"`
	// Holds is the filesystem that was seen on the volume when it was deferred.
	Holds string `json:"holds,omitempty"`
	Node  *node  `json:"node,omitempty"`
}

const recordVersion = 1

// snapshot is what only the record of a snapshot has. A snapshot is an image that is never
// attached; its Source is the volume.
type snapshot struct {
	// Consistent: the filesystem was not in use at that moment, or was frozen. A snapshot
	// that is not is as after a loss of power, and is repaired when it is mounted.
	Consistent bool `json:"consistent"`
	// Group is the group snapshot of which it is a part, or "".
	Group string `json:"group,omitempty"`
	// Number is larger than that of each earlier snapshot of the volume that is left. It
	// tells which of two is older, whatever the clock does.
	Number int64 `json:"number"`
}

func (s *snapshot) String() string {
	if s.Consistent {
		return "filesystem"
	}
	return "crash"
}

// source names the volume or the snapshot whose content an image began with.
type source struct {
	Volume   string `json:"volume,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
}

func (s source) id() string { return s.Volume + s.Snapshot }

func (s source) String() string {
	switch {
	case s.Snapshot != "":
		return fmt.Sprintf("snapshot %q", s.Snapshot)
	case s.Volume != "":
		return fmt.Sprintf("volume %q", s.Volume)
	}
	return "nothing"
}

// node is what was asked for on this node. It ends with the boot, as mounts do.
type node struct {
	Boot      string                 `json:"boot"`
	Staging   string                 `json:"staging,omitempty"`
	Block     bool                   `json:"block,omitempty"`
	FSType    string                 `json:"fsType,omitempty"`
	ReadOnly  bool                   `json:"readOnly,omitempty"` // by the access mode
	Published map[string]publication `json:"published,omitempty"`
}

// publication is how a volume is published at a target path.
type publication struct {
	Block    bool `json:"block,omitempty"`
	ReadOnly bool `json:"readOnly,omitempty"`
	Deferred bool `json:"deferred,omitempty"`
	// Sole: no other may be beside it.
	Sole bool `json:"sole,omitempty"`
}

// publish adds a publication without touching the record that is on disk.
func (r *record) publish(target string, p publication) {
	n := *r.Node
	n.Published = maps.Clone(n.Published)
	if n.Published == nil {
		n.Published = make(map[string]publication)
	}
	n.Published[target] = p
	r.Node = &n
}

func (r *record) unpublish(target string) {
	if r.Node == nil {
		return
	}
	n := *r.Node
	n.Published = maps.Clone(n.Published)
	delete(n.Published, target)
	r.Node = &n
}
