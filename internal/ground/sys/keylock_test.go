package sys

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestKeyLocksExcludePerKey(t *testing.T) {
	var locks KeyLocks[string]
	var inside [2]atomic.Int32
	keys := []string{"a", "b"}
	var workers sync.WaitGroup
	for i := range 16 {
		workers.Go(func() {
			for range 200 {
				unlock, err := locks.Lock(context.Background(), keys[i%2])
				if err != nil {
					t.Error(err)
					return
				}
				check.That(t, inside[i%2].Add(1) == 1, "two holders of one key")
				inside[i%2].Add(-1)
				unlock()
			}
		})
	}
	workers.Wait()
	check.That(t, len(locks.locks) == 0, "%d locks are left", len(locks.locks))
}

func TestKeyLockGivesUpWithItsCaller(t *testing.T) {
	var locks KeyLocks[string]
	unlock := check.Value(locks.Lock(context.Background(), "a"))(t)
	ctx := check.Within(t, time.Millisecond)
	check.Is(t, check.Err(locks.Lock(ctx, "a")), context.DeadlineExceeded)
	_, free := locks.TryLock("a")
	check.That(t, !free, "a lock that is held was free")
	check.Value(locks.Lock(ctx, "b"))(t)() // another one is free
	unlock()
	again, free := locks.TryLock("a")
	check.Require(t, free, "a lock that was given back is not free")
	again()
	check.That(t, len(locks.locks) == 0, "%d locks are left", len(locks.locks))
}
