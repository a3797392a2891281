package sys

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestLooksThatHang: each key has one look at most, and no caller waits longer than lookTime, also not if many hang.
func TestLooksThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks Looks[int]
		var running atomic.Int32
		server := make(chan struct{})
		hang := func() (int, error) {
			running.Add(1)
			<-server
			running.Add(-1)
			return 1, nil
		}
		for key := range 2 * maxHung {
			began := time.Now()
			for range 3 {
				_, err := Look(&looks, key, hang)
				check.Require(t, errors.Is(err, ErrHangs) && time.Since(began) <= lookTime, "%d: %v after %v", key, err, time.Since(began))
			}
		}
		check.That(t, running.Load() == maxHung, "%d looks run", running.Load())
		close(server)
		synctest.Wait()
		for key := range 2 * maxHung {
			seen, err := Look(&looks, key, hang)
			check.Require(t, seen == 1 && err == nil && len(looks.last) == 0, "%d: %d, %v; %d run still", key, seen, err, len(looks.last))
		}
	})
}

// TestLooksTakeTurns: a caller waits for the look of another one.
func TestLooksTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looks Looks[string]
		var running, seen atomic.Int32
		for range 10 {
			go func() {
				_, err := Look(&looks, "disk", func() (int, error) {
					check.That(t, running.Add(1) <= 1, "two at once")
					time.Sleep(lookTime * 21 / 200) // the last turn comes shortly before the end of the wait for it
					running.Add(-1)
					return 0, nil
				})
				if err == nil {
					seen.Add(1)
				}
			}()
		}
		time.Sleep(2 * lookTime)
		synctest.Wait()
		check.That(t, seen.Load() == 10, "%d of 10", seen.Load())
	})
}
