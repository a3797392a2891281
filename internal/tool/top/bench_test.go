package top

import (
	"testing"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// A picture is drawn at most frames times a second, and must be far quicker than
// that on a node with a thousand volumes.

func busy() *State {
	s := New(Settings{Interval: DefaultInterval}, now)
	s.Apply(Size{Width: 200, Height: 60})
	s.Apply(Watched{Changes: append(changed(many(1000)...), syncedEvent)})
	s.Apply(looked())
	return s
}

func BenchmarkView(b *testing.B) {
	s := busy()
	for b.Loop() {
		if s.View() == "" {
			b.Fatal("nothing is drawn")
		}
	}
}

func BenchmarkAnswer(b *testing.B) {
	s, all := busy(), many(1000)
	for i := 0; b.Loop(); i++ {
		s.Apply(answer(all[i%len(all)].GetId(), now.Add(time.Duration(i)*time.Millisecond)))
	}
}

func BenchmarkHundredChanges(b *testing.B) {
	s, changes := busy(), changed(many(1000)[:100]...)
	for b.Loop() {
		s.Apply(Watched{Changes: changes})
	}
}

func BenchmarkListing(b *testing.B) {
	s, all := busy(), many(1000)
	for b.Loop() {
		s.Apply(Polled{At: now, Volumes: all})
	}
}

func BenchmarkFilterKey(b *testing.B) {
	s := busy()
	press(s, "/")
	for b.Loop() {
		press(s, "v", "backspace")
	}
}

func BenchmarkFirstListing(b *testing.B) {
	all := append(changed(many(1000)...), &adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_SYNCED})
	for b.Loop() {
		New(Settings{}, now).Apply(Watched{Changes: all})
	}
}
