package deferral

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestOneSlowVolumeKeepsNobodyWaiting: on one processor, too.
func TestOneSlowVolumeKeepsNobodyWaiting(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	all := newTable(NoObserver{})
	for n := range 100 {
		all.volumes[volume.Key(rune(n))] = &entry{rec: &record{}}
	}
	var rest sync.WaitGroup
	rest.Add(99)
	var hung atomic.Bool
	err := all.each(t.Context(), func(context.Context, *entry) {
		if hung.CompareAndSwap(false, true) {
			rest.Wait() // hangs until all others are done
			return
		}
		rest.Done()
	})
	if err != nil {
		t.Error(err)
	}
}
