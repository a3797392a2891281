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

// markOf returns the mark of a volume for a decision, or nil.
func (f *Front) markOf(id staging.VolumeID) *decision.Mark {
	mark, err := f.store.Marks.Get(id)
	if mark == nil && err == nil {
		return nil
	}
	out := &decision.Mark{Path: f.store.Marks.Path(id), Err: err}
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
func (f *Front) mark(rules *decision.Rules, w policy.Input, mark staging.Mark, published bool) (marked bool, err error) {
	then := rules.Policy.ThenOnHost(w, mark.Rule)
	if w.Inline || decision.IsInlineID(mark.VolumeID) || then == policy.HostAllowed || then == "" && published {
		return false, nil
	}
	marks, id := f.store.Marks, staging.VolumeID{Driver: mark.Driver, ID: mark.VolumeID}
	known, err := marks.Get(id)
	hostMounts := func(handler string) bool { return rules.Abilities(handler).HostMounts }
	if err == nil && known != nil && (hostMounts(mark.Handler) || !hostMounts(known.Handler)) {
		return false, nil
	}
	mark.Since = time.Now().UTC().Truncate(time.Second)
	err = marks.Put(mark)
	if err != nil && known == nil { // it may be there, but not for sure
		err = errors.Join(err, marks.Remove(id))
	}
	return known == nil, err
}

// markReleased marks a volume whose pod ends.
func (f *Front) markReleased(v *volume.Volume) {
	if v.ReadOnly || v.Origin == nil {
		return
	}
	w := policy.Input{Driver: v.Driver, FSType: v.FSType, AccessMode: v.Origin.AccessMode}
	mark := staging.Mark{Driver: v.Driver, VolumeID: v.Origin.VolumeID, Rule: v.Origin.Rule, Handler: v.Handler}
	if _, err := f.mark(f.rules(), w, mark, true); err != nil {
		f.cfg.Log.Error("the volume cannot be marked, so this node may mount it although a sandbox had it read-write", zap.String("volume", v.Target), zap.Error(err))
	}
}
