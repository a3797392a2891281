package driver

import (
	"fmt"
	"maps"
	"time"
)

// record is the record of a volume, a snapshot or a group of snapshots.
type record struct {
	Version  int       `json:"version"`
	ID       string    `json:"id"`
	Capacity int64     `json:"capacity"`
	Created  time.Time `json:"created"`
	// Ready is set after the image was made, and cleared before it is removed.
	Ready bool `json:"ready"`
	// Ephemeral volumes exist only while they are published.
	Ephemeral bool `json:"ephemeral,omitempty"`
	// Source is what the image was made from. A volume without a source was blank at first.
	Source source `json:"source,omitzero"`
	// AsFrozen: the filesystem of a volume is that of a consistent source, and nobody has mounted
	// it since where that writes.
	AsFrozen bool `json:"asFrozen,omitempty"`
	// Snapshot is set if this is a snapshot.
	Snapshot *snapshot `json:"snapshot,omitempty"`
	// Volumes are the source volumes of a group of snapshots, sorted. Other records have none.
	Volumes []string `json:"volumes,omitempty"`
	// Buffered: its loop devices use the node's page cache.
	Buffered bool `json:"buffered,omitempty"`
	// Holds is the filesystem that was found or made on the volume when it was deferred.
	Holds string `json:"holds,omitempty"`
	Node  *node  `json:"node,omitempty"`
}

const recordVersion = 1

// snapshot has the fields of a snapshot. Its image is never attached; its Source is the
// volume.
type snapshot struct {
	// Consistent: the filesystem was frozen or not in use. Otherwise the snapshot is as after
	// a loss of power, and the filesystem is repaired when it is mounted.
	Consistent bool `json:"consistent"`
	// Group is the id of the group snapshot that it belongs to, or "".
	Group string `json:"group,omitempty"`
	// Number is larger than the numbers of all earlier snapshots of the volume that still
	// exist. It shows which of two is older, independent of the clock.
	Number int64 `json:"number"`
}

func (s *snapshot) String() string {
	if s.Consistent {
		return "filesystem"
	}
	return "crash"
}

// consistent reports whether the filesystem on the image is complete without its log, because
// it was frozen or not in use when the image was made.
func (r *record) consistent() bool {
	return r.AsFrozen || r.Snapshot != nil && r.Snapshot.Consistent
}

// setConsistent sets what consistent reports.
func (r *record) setConsistent(is bool) {
	if r.Snapshot != nil {
		r.Snapshot.Consistent = is
	} else {
		r.AsFrozen = is
	}
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

// node says how a volume is staged and published on this node. It is valid for one boot, as
// mounts are.
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
	// Sole: the volume may not be published at another target.
	Sole bool `json:"sole,omitempty"`
}

// publish adds a publication to the record in memory.
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
