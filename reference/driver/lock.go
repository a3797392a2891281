package driver

import (
	"context"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// locks is one lock a volume, waited for no longer than the caller does.
type locks struct {
	mu   sync.Mutex
	held map[string]*lock
}

type lock struct {
	token chan struct{} // holds one token while locked
	refs  int
}

// take takes the locks of volumes, or of a volume and its source. All callers take them
// in the same order, so that no two of them wait for each other.
func (l *locks) take(ctx context.Context, ids ...string) (release func(), err error) {
	var held []func()
	release = func() {
		for _, one := range held {
			one()
		}
	}
	for _, id := range slices.Compact(slices.Sorted(slices.Values(ids))) {
		one, err := l.takeOne(ctx, id)
		if err != nil {
			release()
			return nil, err
		}
		held = append(held, one)
	}
	return release, nil
}

func (l *locks) takeOne(ctx context.Context, id string) (release func(), err error) {
	entry := l.enter(id)
	select {
	case entry.token <- struct{}{}:
		return func() { <-entry.token; l.leave(id, entry) }, nil
	case <-ctx.Done():
		l.leave(id, entry)
		return nil, status.Errorf(codes.Aborted, "volume %q: another operation is still under way", id)
	}
}

func (l *locks) enter(id string) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil {
		l.held = make(map[string]*lock)
	}
	entry, ok := l.held[id]
	if !ok {
		entry = &lock{token: make(chan struct{}, 1)}
		l.held[id] = entry
	}
	entry.refs++
	return entry
}

func (l *locks) leave(id string, entry *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if entry.refs--; entry.refs == 0 {
		delete(l.held, id)
	}
}
