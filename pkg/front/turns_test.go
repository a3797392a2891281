package front

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

func TestOneTurnAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all turns
		inside, done := 0, 0
		var callers sync.WaitGroup
		for range 10 {
			callers.Go(func() {
				end, err := all.take(t.Context(), volumeID{"d", "v"})
				if err != nil {
					t.Error(err)
					return
				}
				inside++
				if inside != 1 {
					t.Errorf("%d calls at once", inside)
				}
				time.Sleep(100 * time.Millisecond)
				inside--
				done++
				end()
			})
		}
		callers.Wait()
		if done != 10 || len(all.taken) != 0 {
			t.Errorf("%d calls done, %d turns left", done, len(all.taken))
		}
	})
}

func TestNobodyWaitsLongForATurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all turns
		end, err := all.take(t.Context(), volumeID{"d", "v"})
		if err != nil {
			t.Fatal(err)
		}
		if other, err := all.take(t.Context(), volumeID{"d", "w"}); err != nil {
			t.Errorf("another volume waits: %v", err)
		} else {
			other()
		}
		began := time.Now()
		_, err = all.take(t.Context(), volumeID{"d", "v"})
		if deferral.KindOf(err) != deferral.Busy || time.Since(began) != turnPatience {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err = all.take(ctx, volumeID{"d", "v"}); deferral.KindOf(err) != deferral.Busy {
			t.Errorf("with a deadline: %v", err)
		}
		end()
	})
}

// TestHungDriverHoldsUpItsVolumeOnly has a publish that hangs in the driver.
func TestHungDriverHoldsUpItsVolumeOnly(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.driver.block = make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() { _, err := r.kubelet.NodePublishVolume(ctx, r.publishReq("p1")); ended <- err }()
	other := r.stageReq()
	other.VolumeId = "vol-2"
	r.ok(r.kubelet.NodeStageVolume(t.Context(), other))
	again, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	_, err := r.kubelet.NodePublishVolume(again, r.publishReq("p1"))
	if code := codeOf(err); code != codes.DeadlineExceeded && code != codes.Aborted {
		t.Errorf("a second call: %v", err)
	}
	r.refused(<-ended, codes.DeadlineExceeded)
	close(r.driver.block)
	r.ok(nil, r.unpublish("p1"))
}
