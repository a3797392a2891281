package sys

import (
	"context"
	"sync"
)

// KeyLocks is one lock for each key. Callers wait for a lock with a context. The zero value is ready to use.
type KeyLocks[K comparable] struct {
	mu    sync.Mutex
	locks map[K]chan struct{} // those that are held; each is closed when it is released
}

// Lock waits for the key's lock and returns the function that releases it. If the
// context ends first, Lock returns the context's error and leaves nothing behind.
func (l *KeyLocks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	mine := make(chan struct{})
	for {
		l.mu.Lock()
		held := l.locks[key]
		if held == nil {
			if l.locks == nil {
				l.locks = make(map[K]chan struct{})
			}
			l.locks[key] = mine
			l.mu.Unlock()
			return func() { l.mu.Lock(); delete(l.locks, key); l.mu.Unlock(); close(mine) }, nil
		}
		l.mu.Unlock()
		select {
		case <-held:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// TryLock is Lock without waiting. If the lock is taken, free is false and unlock nil.
func (l *KeyLocks[K]) TryLock(key K) (unlock func(), free bool) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	unlock, err := l.Lock(ended, key)
	return unlock, err == nil
}
