package csi

import (
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// marker marks volumes that sandboxes get read-write.
type marker struct {
	marks   *staging.Marks
	policy  *policy.Policy
	volumes Volumes
	log     *zap.Logger
}

// of returns the mark of a volume for a decision, or nil.
func (m marker) of(id staging.VolumeID) *decision.Mark {
	mark, err := m.marks.Get(id)
	if mark == nil && err == nil {
		return nil
	}
	out := &decision.Mark{Path: m.marks.Path(id), Err: err}
	if mark != nil {
		out.Rule, out.Handler, out.Since = mark.Rule, mark.Handler, mark.Since
	}
	return out
}

// mark marks a volume that a sandbox gets read-write, unless the policy allows the host to mount
// it later. It reports whether the mark is new. Inline volumes are not marked: they end with
// their only pod. The mark of a virtual machine replaces that of a handler with HostMounts.
//
// If the volume is published already, its first publish has decided. It is marked then only if
// a rule refuses explicitly, because an older crust-proxy may have deferred it without a mark.
func (m marker) mark(w policy.Input, mark staging.Mark, published bool) (marked bool, err error) {
	then := m.policy.ThenOnHost(w, mark.Rule)
	if w.Inline || decision.IsInlineID(mark.VolumeID) || then == policy.HostAllowed || then == "" && published {
		return false, nil
	}
	known, err := m.marks.Get(staging.VolumeID{Driver: mark.Driver, ID: mark.VolumeID})
	hostMounts := func(handler string) bool { return m.volumes.Abilities(handler).HostMounts }
	if err == nil && known != nil && (hostMounts(mark.Handler) || !hostMounts(known.Handler)) {
		return false, nil
	}
	mark.Since = time.Now().UTC().Truncate(time.Second)
	err = m.marks.Put(mark)
	if err != nil && known == nil { // it may be there, but not for sure
		err = errors.Join(err, m.marks.Remove(staging.VolumeID{Driver: mark.Driver, ID: mark.VolumeID}))
	}
	return known == nil, err
}

// markReleased marks a volume whose pod ends.
func (m marker) markReleased(v *volume.Volume) {
	if v.ReadOnly || v.Origin == nil {
		return
	}
	w := policy.Input{Driver: v.Driver, FSType: v.FSType, AccessMode: v.Origin.AccessMode}
	mark := staging.Mark{Driver: v.Driver, VolumeID: v.Origin.VolumeID, Rule: v.Origin.Rule, Handler: v.Handler}
	if _, err := m.mark(w, mark, true); err != nil {
		m.log.Error("the volume cannot be marked, so this node may mount it although a sandbox had it read-write", zap.String("volume", v.Target), zap.Error(err))
	}
}
