package refusal

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func refusalOf(i int) Refusal {
	target := fmt.Sprintf("/t/%05d", i)
	return Refusal{Key: volume.KeyOf(target), Target: target}
}

func TestRefusalsAreForgottenAfterTheLastTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		told := make(map[volume.Key]int)
		r := NewList(func(key volume.Key) { mu.Lock(); told[key]++; mu.Unlock() })
		first := refusalOf(1)
		start := time.Now()
		r.Add(first)
		time.Sleep(refusalKept - time.Second)
		r.Add(first)
		time.Sleep(refusalKept - time.Second)
		synctest.Wait()
		got, ok := r.Get(first.Key)
		if !ok || got.Count != 2 || !got.First.Equal(start) || !got.Last.Equal(start.Add(refusalKept-time.Second)) {
			t.Errorf("kept: %+v, %v", got, ok)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !r.Empty() || told[first.Key] != 3 {
			t.Errorf("kept for ever: %+v, told %d times", r.All(), told[first.Key])
		}
	})
}

func TestRefusalsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewList(func(volume.Key) {})
		for i := range maxRefusals {
			r.Add(refusalOf(i))
			time.Sleep(time.Millisecond)
		}
		r.Add(refusalOf(0)) // tried again: another one is the oldest now
		r.Add(refusalOf(maxRefusals))
		all := r.All()
		if len(all) != maxRefusals || all[0].Target != "/t/00000" || all[1].Target != "/t/00002" {
			t.Errorf("%d kept, the first are %s and %s", len(all), all[0].Target, all[1].Target)
		}
		r.Forget(func(one *Refusal) bool { return strings.HasSuffix(one.Target, "0") })
		if n := len(r.All()); n != maxRefusals-101 {
			t.Errorf("%d are left", n)
		}
	})
}
