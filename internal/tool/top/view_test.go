package top

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		check.Must(t, os.WriteFile(file, []byte(got+"\n"), 0o600))
	}
	check.Same(t, cmp.Diff(string(check.Value(os.ReadFile(file))(t)), got+"\n"), "%s (-want +got)", name)
}

func TestPictures(t *testing.T) {
	at := func(width, height int, change ...func(*State)) *State {
		s := full(plainSettings(), width, height)
		for _, do := range change {
			do(s)
		}
		return s
	}
	keys := func(names ...string) func(*State) { return func(s *State) { press(s, names...) } }
	away := func(s *State) {
		s.Apply(Disconnected{At: now, Retry: now.Add(4 * time.Second), Reason: "crust-proxy is not running: nobody listens"})
		s.Apply(Clock{Now: now.Add(time.Second)})
	}
	ascii := plainSettings()
	ascii.ASCII = true
	styled := plainSettings()
	styled.Plain = false
	selected := plainSettings()
	selected.State, selected.Handler = "BOUND", "kata"
	for name, s := range map[string]*State{
		"list-80x24.txt":     at(80, 24),
		"list-160x20.txt":    at(160, 20),
		"list-220x20.txt":    at(220, 20),
		"list-40x10.txt":     at(40, 10),
		"list-20x5.txt":      at(20, 5),
		"list-ascii.txt":     full(ascii, 100, 20),
		"list-styled.txt":    full(styled, 80, 16),
		"list-selected.txt":  full(selected, 80, 16),
		"list-empty.txt":     New(plainSettings(), now),
		"list-away.txt":      at(80, 20, away),
		"list-paused.txt":    at(80, 20, keys("p")),
		"list-second.txt":    at(80, 20, keys("n", "r", "down")),
		"filter-typing.txt":  at(80, 20, keys("/", "b", "o", "u", "n", "d", "space", "s", "h")),
		"filter-nothing.txt": at(80, 14, keys("/", "x", "y", "z", "enter")),
		"detail.txt":         at(80, 34, keys("n", "G", "up", "enter")),
		"detail-low.txt":     at(60, 10, keys("enter", "down", "down", "down")),
		"detail-hostile.txt": at(80, 30, keys("t", "enter")),
		"detail-refused.txt": at(80, 24, keys("t", "down", "enter")),
		"detail-gone.txt":    at(80, 10, keys("enter"), func(s *State) { s.Apply(Watched{Changes: append(changed(), removed(s.detail.id))}) }, happened),
		"help.txt":           at(80, 30, keys("?")),
		"help-low.txt":       at(80, 10, keys("?")),
		"help-narrow.txt":    at(60, 24, keys("?")),
	} {
		t.Run(name, func(t *testing.T) { golden(t, name, s.View()) })
	}
}

// sgr is what our own pictures paint with.
var sgr = regexp.MustCompile("\x1b\\[[0-9;]*m")

// wantTame fails where a picture does not fit its screen, has no room for a volume, or holds
// what a terminal would obey.
func wantTame(t *testing.T, s *State) {
	t.Helper()
	lines := strings.Split(s.View(), "\n")
	check.That(t, len(lines) <= s.canvas.height && s.frame().rows >= 1,
		"%dx%d: %d lines, %d for volumes", s.canvas.width, s.canvas.height, len(lines), s.frame().rows)
	for _, line := range lines {
		bare := sgr.ReplaceAllString(line, "")
		got := cells(bare)
		check.That(t, got <= s.canvas.width, "%dx%d: %d cells: %q", s.canvas.width, s.canvas.height, got, bare)
		i := strings.IndexFunc(bare, func(r rune) bool { return !unicode.IsPrint(r) })
		check.That(t, i < 0, "%dx%d: a terminal would obey %q", s.canvas.width, s.canvas.height, bare)
		check.That(t, !s.settings.ASCII || strings.IndexFunc(bare, func(r rune) bool { return r > unicode.MaxASCII }) < 0, "not ASCII: %q", bare)
	}
}

func TestPicturesFitEveryScreen(t *testing.T) {
	for _, settings := range []Settings{plainSettings(), {Interval: time.Second}, {Interval: time.Second, ASCII: true, State: "BOUND", Driver: "\x1b[2J"}} {
		s := full(settings, 80, 24)
		for i, keys := range [][]string{nil, {"enter"}, {"?"}, {"x", "esc", "/", "a"}} {
			press(s, keys...)
			if i == 1 {
				s.Apply(Disconnected{At: now, Reason: "gone"})
			}
			for width := 1; width < 250; width += 1 + width/4 {
				for height := 1; height < 60; height += 1 + height/4 {
					s.Apply(Size{Width: width, Height: height})
					wantTame(t, s)
				}
			}
		}
	}
}

func FuzzHostileTexts(f *testing.F) {
	f.Add("pvc\x1b[2J", "no\nway \u202e", uint8(80), uint8(24), false)
	f.Add("容量容量容量", "e\u0301\u0301\u0301 \U0001f468\u200d\U0001f469", uint8(7), uint8(3), true)
	f.Fuzz(func(t *testing.T, name, text string, width, height uint8, ascii bool) {
		s := full(Settings{Interval: time.Second, ASCII: ascii, Filter: name}, int(width), int(height))
		v := volumes()[0]
		v.TargetPath, v.LastError, v.PodName, v.Driver, v.MountFlags = "/x/"+name+"/mount", text, text, name, []string{text, name}
		v.Condition.Message, v.Sandbox.Id, v.Handler = text, name, text
		s.Apply(Watched{Changes: changed(v)})
		press(s, "esc")
		wantTame(t, s)
		s.Apply(Key{Name: "/"})
		s.Apply(Key{Name: "paste", Text: text})
		wantTame(t, s)
		press(s, "esc", "enter")
		wantTame(t, s)
		s.Apply(StatsFetched{ID: v.GetId(), At: now, Failure: text})
		s.Apply(Disconnected{At: now, Reason: text})
		wantTame(t, s)
	})
}

// The page on crustctl shows a picture that top has drawn.
func TestThePageShowsARealPicture(t *testing.T) {
	page := check.Value(os.ReadFile("../../../docs/crustctl.md"))(t)
	s := New(plainSettings(), now)
	s.Apply(Size{Width: 96, Height: 11})
	s.Apply(Watched{Changes: append(changed(tidyVolumes()...), syncedEvent)})
	e := looked()
	e.Handlers[1].Healthy = true
	s.Apply(e)
	press(s, "down")
	var picture strings.Builder
	for line := range strings.SplitSeq(s.View(), "\n") {
		picture.WriteString(strings.TrimRight("    "+line, " ") + "\n")
	}
	check.That(t, strings.Contains(string(page), picture.String()), "docs/crustctl.md does not show this:\n%s", picture.String())
}

func TestStatesOfEqualUrgencyKeepTheirOrder(t *testing.T) {
	refused, held := volumes()[4], proto.CloneOf(volumes()[4])
	held.Id, held.State = id(9), adminv1.VolumeState_VOLUME_STATE_HELD
	s := New(plainSettings(), now)
	s.Apply(Watched{Changes: append(changed(held, refused), syncedEvent)})
	want := s.View()
	for range 50 {
		got := s.View()
		check.Require(t, got == want, "%v", cmp.Diff(want, got))
	}
}
