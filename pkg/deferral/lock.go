package deferral

import (
	"context"
	"errors"
	"sync"
)

// keyLocks is one lock a volume, waited for with a context.
type keyLocks struct {
	mu    sync.Mutex
	locks map[Key]*keyLock
}

type keyLock struct {
	held chan struct{} // holds one token while locked
	refs int
}

// lock takes the volume's lock and gives the way to release it. A caller that
// gives up waiting leaves nothing behind.
func (l *keyLocks) lock(ctx context.Context, key Key) (unlock func(), err error) {
	entry := l.enter(key)
	select {
	case entry.held <- struct{}{}:
		return func() { <-entry.held; l.leave(key, entry) }, nil
	case <-ctx.Done():
		l.leave(key, entry)
		return nil, Errorf(contextKind(ctx), "another operation on volume %s is still under way: %w", key.Short(), ctx.Err())
	}
}

func (l *keyLocks) enter(key Key) *keyLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = make(map[Key]*keyLock)
	}
	entry, ok := l.locks[key]
	if !ok {
		entry = &keyLock{held: make(chan struct{}, 1)}
		l.locks[key] = entry
	}
	entry.refs++
	return entry
}

func (l *keyLocks) leave(key Key, entry *keyLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	entry.refs--
	if entry.refs == 0 {
		delete(l.locks, key)
	}
}

// contextKind classes the end of a context.
func contextKind(ctx context.Context) Kind {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return Timeout
	}
	return Canceled
}
