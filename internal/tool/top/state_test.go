package top

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// many are bound volumes, v000 the fullest.
func many(n int) []*adminv1.Volume {
	all := make([]*adminv1.Volume, n)
	for i := range all {
		all[i] = &adminv1.Volume{
			Id: fmt.Sprintf("%064x", i), TargetPath: fmt.Sprintf("%suid-%03d/volumes/kubernetes.io~csi/v%03d/mount", kubelet, i, i),
			State: adminv1.VolumeState_VOLUME_STATE_BOUND, Driver: "disk", Handler: "kata", Sandbox: sandbox(fmt.Sprint(i)),
			CreatedAt: before(time.Duration(i) * time.Minute), Usage: usage(int64(n-i)<<20, int64(n)<<20), UsageAt: before(time.Minute),
		}
	}
	return all
}

func crowd(n, height int) *State {
	s := New(plainSettings(), now)
	s.Apply(Size{Width: 80, Height: height})
	s.Apply(Watched{Changes: changed(many(n)...)})
	return s
}

func names(s *State) (all []string) {
	for _, r := range s.list.rows {
		all = append(all, r.name)
	}
	return all
}

func answer(id string, at time.Time) StatsFetched {
	return StatsFetched{ID: id, At: at, Took: time.Millisecond, Reply: &adminv1.GetVolumeStatsResponse{Usage: usage(1, 10)}}
}

func TestOnlyWhatIsOnTheScreenIsAsked(t *testing.T) {
	s := crowd(100, 20)
	press(s, "n") // answers change no order
	check.Empty(t, asked(s.requests()), "asked before the listing is whole")
	waiting := asked(s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}}))
	seen := map[string]bool{}
	for now := now; len(waiting) > 0; now = now.Add(time.Millisecond) {
		check.Require(t, len(waiting) <= maxConcurrent, "%d asked at once", len(waiting))
		id := waiting[0]
		check.Require(t, !seen[id], "%s was asked again at once", id)
		seen[id] = true
		waiting = append(waiting[1:], asked(s.Apply(answer(id, now)))...)
	}
	for _, r := range s.onScreen() {
		check.That(t, seen[r.id()], "%s is on the screen and was not asked", r.name)
	}
	rows := s.frame().rows
	check.That(t, len(seen) <= rows+maxConcurrent, "%d were asked, and %d are on the screen", len(seen), rows)
	check.Empty(t, asked(s.Apply(Clock{Now: now.Add(time.Second)})), "asked before the interval is over")
	got := asked(s.Apply(Clock{Now: now.Add(DefaultInterval + time.Second)}))
	check.That(t, len(got) == maxConcurrent, "not asked again after the interval: %v", got)
}

// TestALongIntervalIsKept: the bound is one of pauses after failures.
func TestALongIntervalIsKept(t *testing.T) {
	settings := plainSettings()
	settings.Interval = 10 * time.Minute
	s := full(settings, 80, 24)
	for _, r := range s.onScreen() {
		for _, e := range []StatsFetched{answer(r.id(), now), {ID: r.id(), At: now, Failure: "no"}} {
			s.Apply(e)
			next := s.schedule.fetching[r.id()].next
			check.That(t, next.Sub(now) == settings.Interval, "%s is asked again in %s", r.name, next.Sub(now))
		}
	}
}

func TestNobodyIsAskedWhilePaused(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	press(s, "p")
	check.Empty(t, s.Apply(Clock{Now: now.Add(time.Hour)}), "effects")
	picture := s.View()
	s.Apply(Watched{Changes: append(changed(many(3)...), removed(id(1)))})
	check.That(t, s.View() == picture, "the picture changed:\n%s", s.View())
	got := names(s)
	check.That(t, !slices.Contains(got, "v000") && slices.Contains(got, "pvc-postgres-0"), "the picture changed: %v", got)
	check.That(t, len(asked(press(s, "p"))) != 0, "nobody is asked when it goes on")
	got = names(s)
	check.That(t, slices.Contains(got, "v000") && !slices.Contains(got, "pvc-postgres-0"), "what happened meanwhile is not shown: %v", got)
}

func TestSandboxesThatFailAreAskedEverMoreRarely(t *testing.T) {
	s := crowd(1, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	id, at := many(1)[0].GetId(), now
	var pauses []time.Duration
	for range 7 {
		s.Apply(StatsFetched{ID: id, At: at, Took: time.Second, Failure: "it hangs"})
		next := s.schedule.fetching[id].next
		pauses = append(pauses, next.Sub(at))
		at = next
		got := asked(s.Apply(Clock{Now: at}))
		check.Require(t, len(got) == 1, "not asked when it was time: %v", got)
	}
	want := []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute, time.Minute, time.Minute, time.Minute}
	check.That(t, slices.Equal(pauses, want), "paused %v, want %v", pauses, want)
	r := s.node.volumes[id]
	check.That(t, r.err == "it hangs" && r.failed && r.v.GetStatsFailures() == 7, "%+v", r)
	got := s.node.volumes[id].history.errors
	check.That(t, len(got) == 1 && got[0].times == 7, "errors %+v", got)
	s.Apply(answer(id, at))
	r = s.node.volumes[id]
	check.That(t, r.err == "" && !r.failed && s.schedule.fetching[id].next.Sub(at) == DefaultInterval && r.v.GetUsageAt().AsTime().Equal(at), "after it went right: %+v", r)
}

// kubelet asks about once a minute; where nobody does, a full volume must not stay
// at the end of the list because nothing is known of it.
func TestUnknownVolumesBeyondTheScreenAreAskedOnce(t *testing.T) {
	s := New(plainSettings(), now)
	s.Apply(Size{Width: 80, Height: 12})
	all := many(60)
	for _, v := range all {
		v.Usage, v.UsageAt = nil, nil
	}
	waiting := asked(s.Apply(Watched{Changes: append(changed(all...), syncedEvent)}))
	times := map[string]int{}
	for len(waiting) > 0 {
		id := waiting[0]
		times[id]++
		waiting = append(waiting[1:], asked(s.Apply(answer(id, now)))...)
		check.Require(t, len(waiting) <= maxConcurrent, "%d asked at once", len(waiting))
	}
	check.That(t, len(times) == len(all), "%d of %d were asked", len(times), len(all))
	for id, n := range times {
		check.That(t, n == 1, "%s was asked %d times", id, n)
	}
}

func TestTheRelaysBoundIsHalved(t *testing.T) {
	for concurrency, want := range map[int]int{1: 1, 2: 1, 4: 2, 7: 3, 8: 4, 1000: maxConcurrent} {
		s := New(plainSettings(), now)
		s.Apply(Polled{At: now, Node: &adminv1.GetNodeResponse{Config: fmt.Sprintf("relay: {concurrency: %d}", concurrency)}, Drivers: &adminv1.ListDriversResponse{}})
		check.That(t, s.schedule.limit == want, "concurrency %d: %d at once, want %d", concurrency, s.schedule.limit, want)
	}
}

func TestTheLastPictureStaysWhileTheDaemonIsAway(t *testing.T) {
	s := crowd(3, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	s.Apply(Disconnected{At: now.Add(time.Second), Retry: now.Add(2 * time.Second), Reason: "gone"})
	s.Apply(Disconnected{At: now.Add(3 * time.Second), Retry: now.Add(9 * time.Second), Reason: "still gone"})
	s.Apply(Clock{Now: now.Add(4 * time.Second)})
	view := s.View()
	check.That(t, strings.Contains(view, "away 3s") && strings.Contains(view, "still gone") && strings.Contains(view, "v002"), "%s", view)
	check.Equal(t, len(s.Apply(Clock{Now: now.Add(time.Minute)})), 0, "what is asked while the daemon is away")
	s.Apply(StatsFetched{ID: many(1)[0].GetId(), At: now, Failure: "the daemon closed the connection"})
	check.That(t, s.node.volumes[many(1)[0].GetId()].err == "", "the daemon's end is taken for the sandbox's")
	// It comes back without v001, which is shown until that is certain.
	s.Apply(Watched{Changes: changed(many(1)...)})
	check.That(t, len(s.list.rows) == 3, "forgotten before the listing was whole: %v", names(s))
	effects := s.Apply(Watched{Changes: append(changed(many(3)[2]), syncedEvent)})
	got := names(s)
	check.That(t, slices.Equal(got, []string{"v000", "v002"}), "%v", got)
	check.That(t, !strings.Contains(s.View(), "away") && len(asked(effects)) != 0, "not live again:\n%s", s.View())
}

// TestADaemonThatHangs: its watch does not end, and the screen is old all the same.
func TestADaemonThatHangs(t *testing.T) {
	s := crowd(3, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	at := func(seconds int) time.Time { return now.Add(time.Duration(seconds) * time.Second) }
	s.Apply(Polled{At: at(1), Volumes: many(3)})
	s.Apply(Clock{Now: at(10)}) // it is asked again
	s.Apply(Clock{Now: at(14)})
	check.That(t, !s.hangs(), "it hangs after four seconds")
	s.Apply(Clock{Now: at(16)})
	first := many(1)[0].GetId()
	s.Apply(StatsFetched{ID: first, At: at(16), Failure: "context deadline exceeded", Unanswered: true})
	s.Apply(Polled{At: at(17), Unanswered: true})
	s.Apply(Clock{Now: at(30)})
	view := s.View()
	check.That(t, strings.Contains(view, "NO ANSWER") && strings.Contains(view, "no answer for 20s") && strings.Contains(view, "v002"), "%s", view)
	check.That(t, s.node.volumes[first].err == "", "the daemon's silence is taken for the sandbox's")
	press(s, "enter")
	view = s.View()
	check.That(t, strings.Contains(view, "no answer for 20s"), "%s", view)
	s.Apply(Polled{At: at(31), Volumes: many(3)})
	view = s.View()
	check.That(t, !strings.Contains(strings.ToLower(view), "no answer for"), "%s", view)
}

// An answer that comes while the daemon is away says nothing about what a new watch
// will list: the volume does not stay for it.
func TestAnswersWhileAwayKeepNoVolume(t *testing.T) {
	s := crowd(2, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	s.Apply(Disconnected{At: now, Retry: now, Reason: "gone"})
	s.Apply(answer(many(2)[0].GetId(), now.Add(time.Second)))
	s.Apply(Polled{At: now, Volumes: many(2)[:1]})
	s.Apply(Watched{Changes: append(changed(many(2)[1]), syncedEvent)})
	got := names(s)
	check.That(t, slices.Equal(got, []string{"v001"}), "the new watch lists v001 only, and shown is %v", got)
}

func TestOrders(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	for key, want := range map[string]string{
		"u": "pvc-logs-容量 pvc-postgres-0 disk evil pvc-cache vol-99ff",
		"l": "pvc-logs-容量 pvc-postgres-0 disk evil pvc-cache vol-99ff",
		"a": "pvc-cache vol-99ff pvc-postgres-0 pvc-logs-容量 evil disk",
		"t": "evil vol-99ff pvc-cache pvc-logs-容量 pvc-postgres-0 disk",
		"n": "disk evil pvc-cache pvc-logs-容量 pvc-postgres-0 vol-99ff",
	} {
		press(s, key)
		check.Equal(t, strings.ReplaceAll(strings.Join(names(s), " "), `pvc-\u202egnp.exe\x1b]0;owned\x07`, "evil"), want, "%s", key)
	}
	press(s, "l", "r")
	got := names(s)
	check.That(t, got[0] == "pvc-postgres-0" && got[1] == "pvc-logs-容量", "turned round, what is not known is not last: %v", got)
}

func TestTheKeyGoesRoundAllOrders(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	var seen []string
	for range OrderNames() {
		seen = append(seen, s.list.order.String())
		press(s, "s")
	}
	check.That(t, slices.Equal(seen, OrderNames()) && s.list.order == ByUsage, "%v", seen)
	for _, name := range OrderNames() {
		order, err := ParseOrder(name)
		check.That(t, err == nil && order.String() == name, "%s: %v, %v", name, order, err)
	}
	check.Fails(t, check.Err(ParseOrder("size")), "latency")
}

func TestTheCursorStaysOnItsVolume(t *testing.T) {
	s := crowd(50, 20)
	press(s, "down", "down", "down")
	got := s.list.current().name
	check.Require(t, got == "v003", "on %s", got)
	press(s, "n", "r") // the order is turned round
	now := s.list.current()
	check.That(t, now.name == "v003" && slices.Contains(s.onScreen(), now), "on %s", now.name)
	s.Apply(Watched{Changes: append(changed(), removed(s.list.current().id()))})
	check.Equal(t, s.list.current().name, "v002", "its volume went, and it is on the next")
	press(s, "home")
	fuller := proto.CloneOf(many(50)[0])
	fuller.Id, fuller.TargetPath = strings.Repeat("f", 64), "/x/v999/mount"
	s.Apply(Watched{Changes: changed(fuller)})
	check.Equal(t, s.list.current().name, "v999", "it does not stay at the top")
	press(s, "end", "down", "pgdown")
	got = s.list.current().name
	check.That(t, got == "v000" && s.list.top+s.frame().rows == len(s.list.rows), "the end is %s, the screen begins at %d", got, s.list.top)
	press(s, "pgup")
	check.That(t, s.list.cursor == len(s.list.rows)-s.frame().rows, "a page up is at %d", s.list.cursor)
}

func TestFilter(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	press(s, "/", "E", "B", "S")
	got := names(s)
	check.That(t, len(got) == 3, "while typing: %v", got)
	press(s, "backspace", "backspace", "backspace", "backspace")
	s.Apply(Key{Name: "paste", Text: "refused\n web-1"})
	check.That(t, *s.list.filter.typed == `refused\n web-1`, "pasted %q", *s.list.filter.typed)
	press(s, "ctrl+w")
	check.That(t, *s.list.filter.typed == `refused\n `, "after ctrl+w: %q", *s.list.filter.typed)
	press(s, "ctrl+u", "w", "e", "b", "enter")
	got = names(s)
	check.That(t, slices.Equal(got, []string{"vol-99ff"}) && s.list.filter.text == "web", "kept: %v by %q", got, s.list.filter.text)
	press(s, "/", "q", "esc")
	check.That(t, s.list.filter.text == "web" && len(s.list.rows) == 1, "not as before: %q", s.list.filter.text)
	effects := press(s, "esc")
	check.That(t, s.list.filter.text == "" && len(s.list.rows) == 6 && (len(effects) == 0 || effects[0] != (Quit{})),
		"the filter is not off: %q, %v", s.list.filter.text, effects)
	press(s, "/")
	s.Apply(Key{Name: "paste", Text: strings.Repeat("容", 1000)})
	check.Equal(t, len([]rune(*s.list.filter.typed)), maxFilter, "signs that were taken")
}

// A listing may be older than an answer that came since.
func TestListingsBringNumbersButNoOldOnes(t *testing.T) {
	s := crowd(2, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	all := many(2)
	s.Apply(answer(all[0].GetId(), now))
	older, newer := proto.CloneOf(all[0]), proto.CloneOf(all[1])
	older.Usage, older.StatsAt = usage(9, 9), before(time.Minute)
	newer.Usage, newer.StatsAt, newer.StatsTook, newer.State = usage(9, 9), before(-time.Second), durationpb.New(time.Hour), adminv1.VolumeState_VOLUME_STATE_REMOVING
	gone := proto.CloneOf(all[0])
	gone.Id = "gone"
	s.Apply(Polled{At: now, Volumes: []*adminv1.Volume{older, newer, gone}})
	check.Equal(t, s.node.volumes[all[0].GetId()].bytes.GetUsed(), 1, "an old listing won")
	r := s.node.volumes[all[1].GetId()]
	check.That(t, r.bytes.GetUsed() == 9 && r.took == time.Hour && r.state == "BOUND", "%+v", r)
	check.That(t, s.node.volumes["gone"] == nil, "a listing brought back a volume that went")
}

func TestTheDaemonIsAskedOnceAnInterval(t *testing.T) {
	s := New(plainSettings(), now)
	check.That(t, slices.Contains(s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}}), Effect(Poll{})), "not asked at the start")
	check.That(t, !slices.Contains(s.Apply(Clock{Now: now.Add(time.Minute)}), Effect(Poll{})), "asked again before the answer")
	s.Apply(Clock{Now: now})
	s.Apply(looked())
	all := 0
	for at := now; at.Before(now.Add(time.Minute)); at = at.Add(tick) {
		if slices.Contains(s.Apply(Clock{Now: at}), Effect(Poll{})) {
			all++
			s.Apply(Polled{At: at})
		}
	}
	check.That(t, all == 11, "%d times in a minute", all)
}

func TestDetail(t *testing.T) {
	s := crowd(3, 24)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	for _, v := range many(3) {
		s.Apply(answer(v.GetId(), now))
	}
	press(s, "down")
	got := asked(press(s, "enter"))
	check.That(t, slices.Equal(got, []string{many(3)[1].GetId()}), "opened, it asks %v", got)
	s.Apply(Clock{Now: now.Add(3 * time.Second)})
	check.That(t, strings.Contains(s.View(), "asked 3s ago, no answer yet"), "it does not say that it waits:\n%s", s.View())
	for i := range 9 {
		s.Apply(answer(many(3)[1].GetId(), now.Add(time.Duration(i)*time.Second)))
	}
	s.Apply(StatsFetched{ID: many(3)[1].GetId(), At: now.Add(10 * time.Second), Failure: "it\x1bhangs"})
	s.Apply(Clock{Now: now.Add(15 * time.Second)})
	view := s.View()
	check.Says(t, "the view", view, "████", "12:00:10 (5s ago): it\\x1bhangs", "11 requests, 1 failed")
	got = asked(press(s, "r"))
	check.That(t, len(got) == 1, "r asks %v", got)
	s.Apply(answer(many(3)[1].GetId(), now.Add(16*time.Second)))
	check.That(t, strings.Contains(s.View(), "none now; before:"), "the past error is not shown:\n%s", s.View())
	press(s, "esc")
	check.That(t, s.page == pageList && s.list.current().name == "v001", "back on page %d", s.page)
}

// TestAnAnswerEndsOnlyItsOwnError: a growth that was refused stays, without flickering until the next listing.
func TestAnAnswerEndsOnlyItsOwnError(t *testing.T) {
	s := crowd(1, 24)
	v := many(1)[0]
	v.StatsFailures, v.LastError, v.LastErrorAt = 1, "the device is too small", timestamppb.New(now.Add(-time.Second))
	s.Apply(Watched{Changes: append(changed(v), syncedEvent)})
	id := v.GetId()
	shown := func() string { return s.node.volumes[id].err }
	s.Apply(answer(id, now))
	check.That(t, shown() == "the device is too small", "after an answer the volume's error is %q", shown())
	s.Apply(StatsFetched{ID: id, At: now.Add(time.Second), Failure: "it hangs"})
	check.That(t, shown() == "it hangs" && s.node.volumes[id].failed, "after a failure the volume's error is %q", shown())
	s.Apply(answer(id, now.Add(2*time.Second)))
	check.That(t, shown() == "" && !s.node.volumes[id].failed, "it answers again, and its error is %q", shown())
}

func TestQuitAndSuspend(t *testing.T) {
	for _, keys := range [][]string{{"q"}, {"enter", "q"}, {"?", "q"}, {"ctrl+c"}, {"/", "q", "ctrl+c"}} {
		s := full(plainSettings(), 80, 24)
		effects := press(s, keys...)
		check.That(t, len(effects) == 1 && effects[0] == (Quit{}), "%v: %v", keys, effects)
	}
	effects := press(full(plainSettings(), 80, 24), "ctrl+z")
	check.That(t, len(effects) == 1 && effects[0] == (Suspend{}), "%v", effects)
	s := full(plainSettings(), 80, 24)
	press(s, "/", "q")
	check.That(t, *s.list.filter.typed == "q", "q does not type: %q", *s.list.filter.typed)
}

func TestTimesOfStatsFitTheirColumn(t *testing.T) {
	for _, ascii := range []bool{false, true} {
		s := New(Settings{ASCII: ascii}, now)
		old := &row{asked: true, took: time.Second} // its sandbox has ended
		check.That(t, s.canvas.latency(old) == "-" && latencyColour(old) == show.Plain && !orders[ByLatency].known(old), "the time of a volume without a sandbox")
		for d := time.Duration(0); d < 1000*time.Hour; d += 1 + d/7 {
			r := &row{asked: true, failed: true, took: d}
			got := s.canvas.latency(r)
			check.That(t, cells(got) <= columns[colStats].least, "%v is shown as %q", d, got)
		}
	}
}

func TestErrorsOfConditionsAreNotCounted(t *testing.T) {
	s := New(plainSettings(), now)
	v := many(1)[0]
	v.Condition = &adminv1.VolumeCondition{Abnormal: true, Message: "read-only"}
	for range 5 {
		s.Apply(Watched{Changes: changed(v)})
		s.Apply(Clock{Now: s.now.Add(time.Second)})
	}
	got := s.node.volumes[v.GetId()].history.errors
	check.That(t, len(got) == 1 && got[0].times == 1 && got[0].text == "abnormal: read-only", "%+v", got)
	for i := range 2 * maxErrors {
		v := proto.CloneOf(v)
		v.LastError, v.LastErrorAt = fmt.Sprint("error ", i), timestamppb.New(now)
		s.Apply(Watched{Changes: changed(v)})
	}
	got = s.node.volumes[v.GetId()].history.errors
	check.That(t, len(got) == maxErrors && got[0].text == "error 9", "%+v", got)
}

// The help names no key that does nothing.
func TestKeysOfTheHelpAreBound(t *testing.T) {
	bound := slices.Concat([]action{quitAction, {keys: "ctrl+c ctrl+z"}}, listActions, detailActions)
	for line := range strings.Lines(helpKeys) {
		for _, name := range strings.FieldsFunc(line[:min(helpIndent, len(line)-1)], func(r rune) bool { return strings.ContainsRune(" ,;", r) }) {
			check.That(t, slices.ContainsFunc(bound, func(a action) bool { return a.has(name) }), "%q does nothing", name)
		}
	}
}
