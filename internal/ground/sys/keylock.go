package sys

import (
	"context"
	"sync"
)

// KeyLocks is one lock for each key. Callers wait for a lock with a context. The zero value is ready to use.
type KeyLocks[K comparable] struct {
	mu    sync.Mutex
	locks map[K]*keyLock
}

type keyLock struct {
	held chan struct{} // holds one token while locked
	refs int
}

// Lock waits for the key's lock and returns the function that releases it. If the
// context ends first, Lock returns the context's error and leaves nothing behind.
func (l *KeyLocks[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	lock := l.ref(key)
	select {
	case lock.held <- struct{}{}:
		return func() { <-lock.held; l.unref(key, lock) }, nil
	case <-ctx.Done():
		l.unref(key, lock)
		return nil, ctx.Err()
	}
}

// TryLock is Lock without waiting. If the lock is taken, free is false and unlock nil.
func (l *KeyLocks[K]) TryLock(key K) (unlock func(), free bool) {
	lock := l.ref(key)
	select {
	case lock.held <- struct{}{}:
		return func() { <-lock.held; l.unref(key, lock) }, true
	default:
		l.unref(key, lock)
		return nil, false
	}
}

func (l *KeyLocks[K]) ref(key K) *keyLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = make(map[K]*keyLock)
	}
	lock, ok := l.locks[key]
	if !ok {
		lock = &keyLock{held: make(chan struct{}, 1)}
		l.locks[key] = lock
	}
	lock.refs++
	return lock
}

func (l *KeyLocks[K]) unref(key K, lock *keyLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lock.refs--
	if lock.refs == 0 {
		delete(l.locks, key)
	}
}
