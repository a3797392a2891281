package deferral

import "context"

// OfCSI lists the deferred volumes of one CSI volume: one for each pod that it is
// published for.
func (b *Broker) OfCSI(driver, volumeID string) []Status {
	b.mu.RLock()
	defer b.mu.RUnlock()
	var out []Status
	for _, known := range b.volumes {
		if known.rec.CSI != nil && known.rec.Driver == driver && known.rec.CSI.VolumeID == volumeID {
			out = append(out, known.status())
		}
	}
	return out
}

// Abilities are those of a configured handler; an empty name is the default one.
func (b *Broker) Abilities(handler string) Abilities {
	if handler == "" {
		handler = b.cfg.DefaultHandler
	}
	return abilitiesOf(b.handlers[handler])
}

// GrowAtMount puts on record, and shows to the handler, that the filesystem of a
// volume is to be grown to its device at the next mount.
func (b *Broker) GrowAtMount(ctx context.Context, key Key, size int64) error {
	unlock, err := b.locks.lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	known := b.entry(key)
	if known == nil || known.removing {
		return Errorf(NotFound, "volume %s is not published any more", key.Short())
	}
	next := *known.rec
	next.GrowTo = size
	if err := b.store.put(&next); err != nil {
		return err
	}
	b.replace(key, func(e *entry) { e.rec = &next })
	if handler := b.handlers[next.Handler]; handler != nil {
		return handler.Publish(ctx, &next.Volume)
	}
	return nil // its projection is rebuilt when the handler is configured again
}

// RuleRequested is the rule of a verdict that the orchestrator's own
// defer_fs_ops gave.
const RuleRequested = byRequest
