package sys

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestLooksThatHang: each key has one look at most, and no caller waits longer than lookTime, also not if
// many hang.
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
				if _, err := Look(&looks, key, hang); !errors.Is(err, ErrHangs) || time.Since(began) > lookTime {
					t.Fatalf("%d: %v after %v", key, err, time.Since(began))
				}
			}
		}
		if running.Load() != maxHung {
			t.Errorf("%d looks run", running.Load())
		}
		close(server)
		synctest.Wait()
		for key := range 2 * maxHung {
			if seen, err := Look(&looks, key, hang); seen != 1 || err != nil {
				t.Fatalf("%d: %d, %v", key, seen, err)
			}
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
					if running.Add(1) > 1 {
						t.Error("two at once")
					}
					time.Sleep(lookTime / 20)
					running.Add(-1)
					return 0, nil
				})
				if err == nil {
					seen.Add(1)
				}
			}()
		}
		time.Sleep(lookTime)
		synctest.Wait()
		if seen.Load() != 10 {
			t.Errorf("%d of 10", seen.Load())
		}
	})
}
