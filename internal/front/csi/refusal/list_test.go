package refusal

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func refusalOf(i int) Refusal {
	target := fmt.Sprintf("/t/%05d", i)
	return Refusal{Key: volume.KeyOf(target), Target: target, Driver: "d", VolumeID: fmt.Sprintf("vol-%d", i%10)}
}

type counted map[volume.Key]int

func (c counted) Refused(*Refusal) {}

func (c counted) Changed(key volume.Key) { c[key]++ }

func TestRefusalsAreForgottenAfterTheLastTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		told := make(counted)
		r := NewList(told)
		first := refusalOf(1)
		start := time.Now()
		r.Add(first)
		time.Sleep(refusalKept - time.Second)
		r.Add(first)
		time.Sleep(refusalKept - time.Second)
		synctest.Wait()
		got, ok := r.Refusal(first.Key)
		check.That(t, ok && got.Count == 2 && got.First.Equal(start) && got.Last.Equal(start.Add(refusalKept-time.Second)), "kept: %+v, %v", got, ok)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		check.That(t, len(r.Refused()) == 0 && told[first.Key] == 3, "kept for ever: %+v, told %d times", r.Refused(), told[first.Key])
	})
}

func TestRefusalsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := NewList(make(counted))
		for i := range maxRefusals {
			r.Add(refusalOf(i))
			time.Sleep(time.Millisecond)
		}
		r.Add(refusalOf(0)) // tried again: another one is the oldest now
		r.Add(refusalOf(maxRefusals))
		all := r.Refused()
		check.That(t, len(all) == maxRefusals && all[0].Target == "/t/00000" && all[1].Target == "/t/00002",
			"%d kept, the first are %s and %s", len(all), all[0].Target, all[1].Target)
		r.ForgetTarget("/t/00002")
		r.ForgetVolume("d", "vol-0")
		check.Equal(t, len(r.Refused()), maxRefusals-102, "refusals that are left")
	})
}
