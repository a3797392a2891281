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

// Mark returns what a volume is marked with, or nil.
func (f *Front) Mark(driver, volumeID string) *decision.Mark {
	return f.store.Marks.Get(staging.VolumeID{Driver: driver, ID: volumeID})
}

// mark marks a volume that a sandbox gets read-write, unless the policy allows the host to mount it later. It reports
// whether the mark is new; known is the one that the volume has. Inline volumes are not marked: they end with their
// only pod. The mark of a virtual machine replaces that of a handler with HostMounts.
//
// If the volume is published already, its first publish has decided. It is marked then only if a rule
// refuses explicitly, which may be a rule that has allowed it before.
func (p *driverProxy) mark(rules *decision.Rules, w policy.Input, known, mark *decision.Mark, published bool) (marked bool, err error) {
	then := rules.Policy.ThenOnHost(w, mark.Rule)
	if w.Inline || then == policy.HostAllowed || then == "" && published {
		return false, nil
	}
	isNew := known == nil || known.Err != nil
	hostMounts := func(handler string) bool { return rules.Abilities(handler).HostMounts }
	if !isNew && (hostMounts(mark.Handler) || !hostMounts(known.Handler)) {
		return false, nil
	}
	mark.Since = time.Now().UTC().Truncate(time.Second)
	err = p.marks.Put(mark)
	if err != nil && isNew { // it may be there, but not for sure
		err = errors.Join(err, p.marks.Remove(staging.VolumeID{Driver: mark.Driver, ID: mark.VolumeID}))
	}
	return isNew, err
}

// markReleased marks a volume whose pod ends, if its rule has come to refuse meanwhile.
func (p *driverProxy) markReleased(v *volume.Volume) {
	if v.ReadOnly || v.Origin == nil {
		return
	}
	w := policy.Input{
		Driver: v.Driver, FSType: v.FSType, AccessMode: v.Origin.AccessMode, Inline: decision.IsInlineID(v.Origin.VolumeID),
	}
	mark := &decision.Mark{Driver: v.Driver, VolumeID: v.Origin.VolumeID, Rule: v.Origin.Rule, Handler: v.Handler}
	known := p.marks.Get(staging.VolumeID{Driver: v.Driver, ID: v.Origin.VolumeID})
	if _, err := p.mark(p.front.rules.Load(), w, known, mark, true); err != nil {
		p.log.Error("the volume cannot be marked, so this node may mount it although a sandbox had it read-write", zap.String("target", v.Target), zap.Error(err))
	}
}
