package deferral

import (
	"slices"
	"strings"
	"time"
)

func (b *Broker) entry(key Key) *entry {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.volumes[key]
}

func (b *Broker) remember(rec *record) {
	b.mu.Lock()
	b.volumes[rec.Key] = &entry{rec: rec}
	b.mu.Unlock()
	b.changed(rec.Key)
}

func (b *Broker) forget(key Key) {
	b.mu.Lock()
	delete(b.volumes, key)
	b.mu.Unlock()
	b.changed(key)
}

// replace changes an entry by putting a new one: readers hold the old one
// without a lock.
func (b *Broker) replace(key Key, change func(*entry)) {
	b.mu.Lock()
	old, ok := b.volumes[key]
	if ok {
		next := *old
		change(&next)
		b.volumes[key] = &next
	}
	b.mu.Unlock()
	if ok {
		b.changed(key)
	}
}

func (b *Broker) markRemoving(key Key, problem error) {
	b.replace(key, func(e *entry) {
		e.removing = true
		e.setProblem(problem)
	})
}

func (b *Broker) setProblem(key Key, problem error) {
	if known := b.entry(key); known == nil || (known.problem == nil && problem == nil) {
		return
	}
	b.replace(key, func(e *entry) { e.setProblem(problem) })
}

func (e *entry) setProblem(problem error) {
	if problem != nil && e.problem == nil {
		e.since = time.Now()
	}
	e.problem = problem
}

func (b *Broker) changed(key Key) {
	if b.cfg.OnChange != nil {
		b.cfg.OnChange(key)
	}
}

func (e *entry) status() Status {
	return Status{Volume: &e.rec.Volume, Removing: e.removing, Problem: e.problem, ProblemSince: e.since}
}

// Get gives a volume by key.
func (b *Broker) Get(key Key) (Status, bool) {
	known := b.entry(key)
	if known == nil {
		return Status{}, false
	}
	return known.status(), true
}

// Find gives a volume by its target path, in either form.
func (b *Broker) Find(targetPath string) (Status, bool, error) {
	key, err := b.KeyOfTarget(targetPath)
	if err != nil {
		return Status{}, false, err
	}
	status, ok := b.Get(key)
	return status, ok, nil
}

// KeyOfTarget resolves a target path to its key.
func (b *Broker) KeyOfTarget(targetPath string) (Key, error) {
	t, err := b.targets.resolve(targetPath)
	if err != nil {
		return "", err
	}
	defer t.close()
	return t.key(), nil
}

// List gives all volumes, ordered by target.
func (b *Broker) List() []Status {
	b.mu.RLock()
	out := make([]Status, 0, len(b.volumes))
	for _, known := range b.volumes {
		out = append(out, known.status())
	}
	b.mu.RUnlock()
	slices.SortFunc(out, func(x, y Status) int { return strings.Compare(x.Target, y.Target) })
	return out
}

// Problems are the records that could not be read.
func (b *Broker) Problems() []error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return slices.Clone(b.problems)
}
