package top

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"charm.land/bubbles/v2/key"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
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
	if got := asked(s.requests()); len(got) != 0 {
		t.Errorf("asked before the listing is whole: %v", got)
	}
	waiting := asked(s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}}))
	seen := map[string]bool{}
	for now := now; len(waiting) > 0; now = now.Add(time.Millisecond) {
		if len(waiting) > maxConcurrent {
			t.Fatalf("%d asked at once", len(waiting))
		}
		id := waiting[0]
		if seen[id] {
			t.Fatalf("%s was asked again at once", id)
		}
		seen[id] = true
		waiting = append(waiting[1:], asked(s.Apply(answer(id, now)))...)
	}
	for _, r := range s.onScreen() {
		if !seen[r.id()] {
			t.Errorf("%s is on the screen and was not asked", r.name)
		}
	}
	if rows := s.frame().rows; len(seen) > rows+maxConcurrent {
		t.Errorf("%d were asked, and %d are on the screen", len(seen), rows)
	}
	if got := asked(s.Apply(Clock{Now: now.Add(time.Second)})); len(got) != 0 {
		t.Errorf("asked before the interval is over: %v", got)
	}
	if got := asked(s.Apply(Clock{Now: now.Add(DefaultInterval + time.Second)})); len(got) != maxConcurrent {
		t.Errorf("not asked again after the interval: %v", got)
	}
}

// TestALongIntervalIsKept: the bound is one of pauses after failures.
func TestALongIntervalIsKept(t *testing.T) {
	settings := plainSettings()
	settings.Interval = 10 * time.Minute
	s := full(settings, 80, 24)
	for _, r := range s.onScreen() {
		for _, e := range []StatsFetched{answer(r.id(), now), {ID: r.id(), At: now, Failure: "no"}} {
			s.Apply(e)
			if next := s.schedule.fetching[r.id()].next; next.Sub(now) != settings.Interval {
				t.Errorf("%s is asked again in %s", r.name, next.Sub(now))
			}
		}
	}
}

func TestNobodyIsAskedWhilePaused(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	press(s, "p")
	if effects := s.Apply(Clock{Now: now.Add(time.Hour)}); len(effects) != 0 {
		t.Errorf("%v", effects)
	}
	picture := s.View()
	s.Apply(Watched{Changes: append(changed(many(3)...), removed(id(1)))})
	if s.View() != picture {
		t.Errorf("the picture changed:\n%s", s.View())
	}
	if got := names(s); slices.Contains(got, "v000") || !slices.Contains(got, "pvc-postgres-0") {
		t.Errorf("the picture changed: %v", got)
	}
	if effects := press(s, "p"); len(asked(effects)) == 0 {
		t.Error("nobody is asked when it goes on")
	}
	if got := names(s); !slices.Contains(got, "v000") || slices.Contains(got, "pvc-postgres-0") {
		t.Errorf("what happened meanwhile is not shown: %v", got)
	}
}

func TestVolumesWithoutSandboxAreNotAsked(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	for _, r := range s.list.rows {
		a := s.schedule.fetching[r.id()]
		if wants := r.v.GetSandbox() != nil; wants != !a.since.IsZero() {
			t.Errorf("%s: asked %v, should be %v", r.name, !wants, wants)
		}
	}
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
		if got := asked(s.Apply(Clock{Now: at})); len(got) != 1 {
			t.Fatalf("not asked when it was time: %v", got)
		}
	}
	want := []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute, time.Minute, time.Minute, time.Minute}
	if !slices.Equal(pauses, want) {
		t.Errorf("paused %v, want %v", pauses, want)
	}
	r := s.node.volumes[id]
	if r.err != "it hangs" || !r.failed || r.v.GetStatsFailures() != 7 {
		t.Errorf("%+v", r)
	}
	if got := s.node.volumes[id].history.errors; len(got) != 1 || got[0].times != 7 {
		t.Errorf("errors %+v", got)
	}
	s.Apply(answer(id, at))
	if r := s.node.volumes[id]; r.err != "" || r.failed || s.schedule.fetching[id].next.Sub(at) != DefaultInterval || !r.v.GetUsageAt().AsTime().Equal(at) {
		t.Errorf("after it went right: %+v", r)
	}
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
		if len(waiting) > maxConcurrent {
			t.Fatalf("%d asked at once", len(waiting))
		}
	}
	if len(times) != len(all) {
		t.Errorf("%d of %d were asked", len(times), len(all))
	}
	for id, n := range times {
		if n != 1 {
			t.Errorf("%s was asked %d times", id, n)
		}
	}
}

func TestTheRelaysBoundIsHalved(t *testing.T) {
	for concurrency, want := range map[int]int{1: 1, 2: 1, 4: 2, 7: 3, 8: 4, 1000: maxConcurrent} {
		s := New(plainSettings(), now)
		s.Apply(Polled{At: now, Node: &adminv1.GetNodeResponse{Config: fmt.Sprintf("relay: {concurrency: %d}", concurrency)}, Drivers: &adminv1.ListDriversResponse{}})
		if s.schedule.limit != want {
			t.Errorf("concurrency %d: %d at once, want %d", concurrency, s.schedule.limit, want)
		}
	}
}

func TestTheLastPictureStaysWhileTheDaemonIsAway(t *testing.T) {
	s := crowd(3, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	s.Apply(Disconnected{At: now.Add(time.Second), Retry: now.Add(2 * time.Second), Reason: "gone"})
	s.Apply(Disconnected{At: now.Add(3 * time.Second), Retry: now.Add(9 * time.Second), Reason: "still gone"})
	s.Apply(Clock{Now: now.Add(4 * time.Second)})
	if view := s.View(); !strings.Contains(view, "away 3s") || !strings.Contains(view, "still gone") || !strings.Contains(view, "v002") {
		t.Errorf("%s", view)
	}
	if effects := s.Apply(Clock{Now: now.Add(time.Minute)}); len(effects) != 0 {
		t.Errorf("asked though the daemon is away: %v", effects)
	}
	s.Apply(StatsFetched{ID: many(1)[0].GetId(), At: now, Failure: "the daemon closed the connection"})
	if s.node.volumes[many(1)[0].GetId()].err != "" {
		t.Error("the daemon's end is taken for the sandbox's")
	}
	// It comes back without v001, which is shown until that is certain.
	s.Apply(Watched{Changes: changed(many(1)...)})
	if len(s.list.rows) != 3 {
		t.Errorf("forgotten before the listing was whole: %v", names(s))
	}
	effects := s.Apply(Watched{Changes: append(changed(many(3)[2]), syncedEvent)})
	if got := names(s); !slices.Equal(got, []string{"v000", "v002"}) {
		t.Errorf("%v", got)
	}
	if strings.Contains(s.View(), "away") || len(asked(effects)) == 0 {
		t.Errorf("not live again:\n%s", s.View())
	}
}

// TestADaemonThatHangs: its watch does not end, and the screen is old all the same.
func TestADaemonThatHangs(t *testing.T) {
	s := crowd(3, 20)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	at := func(seconds int) time.Time { return now.Add(time.Duration(seconds) * time.Second) }
	s.Apply(Polled{At: at(1), Volumes: many(3)})
	s.Apply(Clock{Now: at(10)}) // it is asked again
	if s.Apply(Clock{Now: at(14)}); s.hangs() {
		t.Error("it hangs after four seconds")
	}
	s.Apply(Clock{Now: at(16)})
	first := many(1)[0].GetId()
	s.Apply(StatsFetched{ID: first, At: at(16), Failure: "context deadline exceeded", Unanswered: true})
	s.Apply(Polled{At: at(17), Unanswered: true})
	s.Apply(Clock{Now: at(30)})
	if view := s.View(); !strings.Contains(view, "NO ANSWER") || !strings.Contains(view, "no answer for 20s") || !strings.Contains(view, "v002") {
		t.Errorf("%s", view)
	}
	if s.node.volumes[first].err != "" {
		t.Error("the daemon's silence is taken for the sandbox's")
	}
	press(s, "enter")
	if view := s.View(); !strings.Contains(view, "no answer for 20s") {
		t.Errorf("%s", view)
	}
	s.Apply(Polled{At: at(31), Volumes: many(3)})
	if view := s.View(); strings.Contains(strings.ToLower(view), "no answer for") {
		t.Errorf("%s", view)
	}
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
	if got := names(s); !slices.Equal(got, []string{"v001"}) {
		t.Errorf("the new watch lists v001 only, and shown is %v", got)
	}
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
		got := strings.ReplaceAll(strings.Join(names(s), " "), `pvc-\u202egnp.exe\x1b]0;owned\x07`, "evil")
		if got != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
	press(s, "l", "r")
	if got := names(s); got[0] != "pvc-postgres-0" || got[1] != "pvc-logs-容量" {
		t.Errorf("turned round, what is not known is not last: %v", got)
	}
}

func TestTheKeyGoesRoundAllOrders(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	var seen []string
	for range OrderNames() {
		seen = append(seen, s.list.order.String())
		press(s, "s")
	}
	if !slices.Equal(seen, OrderNames()) || s.list.order != ByUsage {
		t.Errorf("%v", seen)
	}
	for _, name := range OrderNames() {
		if order, err := ParseOrder(name); err != nil || order.String() != name {
			t.Errorf("%s: %v, %v", name, order, err)
		}
	}
	if _, err := ParseOrder("size"); err == nil || !strings.Contains(err.Error(), "latency") {
		t.Errorf("%v", err)
	}
}

func TestTheCursorStaysOnItsVolume(t *testing.T) {
	s := crowd(50, 20)
	press(s, "down", "down", "down")
	if got := s.list.current().name; got != "v003" {
		t.Fatalf("on %s", got)
	}
	press(s, "n", "r") // the order is turned round
	if got := s.list.current(); got.name != "v003" || !slices.Contains(s.onScreen(), got) {
		t.Errorf("on %s", got.name)
	}
	s.Apply(Watched{Changes: append(changed(), removed(s.list.current().id()))})
	if got := s.list.current().name; got != "v002" {
		t.Errorf("its volume went, and it is on %s", got)
	}
	press(s, "home")
	fuller := proto.CloneOf(many(50)[0])
	fuller.Id, fuller.TargetPath = strings.Repeat("f", 64), "/x/v999/mount"
	s.Apply(Watched{Changes: changed(fuller)})
	if got := s.list.current().name; got != "v999" {
		t.Errorf("it does not stay at the top: %s", got)
	}
	press(s, "end", "down", "pgdown")
	if got := s.list.current().name; got != "v000" || s.list.top+s.frame().rows != len(s.list.rows) {
		t.Errorf("the end is %s, the screen begins at %d", got, s.list.top)
	}
	press(s, "pgup")
	if got := s.list.cursor; got != len(s.list.rows)-s.frame().rows {
		t.Errorf("a page up is at %d", got)
	}
}

func TestFilter(t *testing.T) {
	s := full(plainSettings(), 80, 24)
	press(s, "/", "E", "B", "S")
	if got := names(s); len(got) != 3 {
		t.Errorf("while typing: %v", got)
	}
	press(s, "backspace", "backspace", "backspace", "backspace")
	s.Apply(Key{Name: "paste", Text: "refused\n web-1"})
	if got := *s.list.filter.typed; got != `refused\n web-1` {
		t.Errorf("pasted %q", got)
	}
	press(s, "ctrl+w")
	if got := *s.list.filter.typed; got != `refused\n ` {
		t.Errorf("after ctrl+w: %q", got)
	}
	press(s, "ctrl+u", "w", "e", "b", "enter")
	if got := names(s); !slices.Equal(got, []string{"vol-99ff"}) || s.list.filter.text != "web" {
		t.Errorf("kept: %v by %q", got, s.list.filter.text)
	}
	press(s, "/", "q", "esc")
	if s.list.filter.text != "web" || len(s.list.rows) != 1 {
		t.Errorf("not as before: %q", s.list.filter.text)
	}
	if effects := press(s, "esc"); s.list.filter.text != "" || len(s.list.rows) != 6 || len(effects) > 0 && effects[0] == (Quit{}) {
		t.Errorf("the filter is not off: %q, %v", s.list.filter.text, effects)
	}
	press(s, "/")
	s.Apply(Key{Name: "paste", Text: strings.Repeat("容", 1000)})
	if got := len([]rune(*s.list.filter.typed)); got != maxFilter {
		t.Errorf("%d signs were taken", got)
	}
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
	if got := s.node.volumes[all[0].GetId()].bytes.GetUsed(); got != 1 {
		t.Errorf("an old listing won: %d", got)
	}
	r := s.node.volumes[all[1].GetId()]
	if r.bytes.GetUsed() != 9 || r.took != time.Hour || r.state != "BOUND" {
		t.Errorf("%+v", r)
	}
	if s.node.volumes["gone"] != nil {
		t.Error("a listing brought back a volume that went")
	}
}

func TestTheDaemonIsAskedOnceAnInterval(t *testing.T) {
	s := New(plainSettings(), now)
	if !slices.Contains(s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}}), Effect(Poll{})) {
		t.Error("not asked at the start")
	}
	if slices.Contains(s.Apply(Clock{Now: now.Add(time.Minute)}), Effect(Poll{})) {
		t.Error("asked again before the answer")
	}
	s.Apply(Clock{Now: now})
	s.Apply(looked())
	all := 0
	for at := now; at.Before(now.Add(time.Minute)); at = at.Add(tick) {
		if slices.Contains(s.Apply(Clock{Now: at}), Effect(Poll{})) {
			all++
			s.Apply(Polled{At: at})
		}
	}
	if all != 11 {
		t.Errorf("%d times in a minute", all)
	}
}

func TestDetail(t *testing.T) {
	s := crowd(3, 24)
	s.Apply(Watched{Changes: []*adminv1.WatchVolumesResponse{syncedEvent}})
	for _, v := range many(3) {
		s.Apply(answer(v.GetId(), now))
	}
	press(s, "down")
	if got := asked(press(s, "enter")); !slices.Equal(got, []string{many(3)[1].GetId()}) {
		t.Errorf("opened, it asks %v", got)
	}
	s.Apply(Clock{Now: now.Add(3 * time.Second)})
	if !strings.Contains(s.View(), "asked 3s ago, no answer yet") {
		t.Errorf("it does not say that it waits:\n%s", s.View())
	}
	for i := range 9 {
		s.Apply(answer(many(3)[1].GetId(), now.Add(time.Duration(i)*time.Second)))
	}
	s.Apply(StatsFetched{ID: many(3)[1].GetId(), At: now.Add(10 * time.Second), Failure: "it\x1bhangs"})
	s.Apply(Clock{Now: now.Add(15 * time.Second)})
	view := s.View()
	for _, part := range []string{"████", "12:00:10 (5s ago): it\\x1bhangs", "11 requests, 1 failed"} {
		if !strings.Contains(view, part) {
			t.Errorf("no %q in\n%s", part, view)
		}
	}
	if got := asked(press(s, "r")); len(got) != 1 {
		t.Errorf("r asks %v", got)
	}
	s.Apply(answer(many(3)[1].GetId(), now.Add(16*time.Second)))
	if !strings.Contains(s.View(), "none now; before:") {
		t.Errorf("the past error is not shown:\n%s", s.View())
	}
	press(s, "esc")
	if s.page != pageList || s.list.current().name != "v001" {
		t.Errorf("back on page %d", s.page)
	}
}

// TestAnAnswerEndsOnlyItsOwnError: a growth that was refused stays, without flickering
// until the next listing.
func TestAnAnswerEndsOnlyItsOwnError(t *testing.T) {
	s := crowd(1, 24)
	v := many(1)[0]
	v.StatsFailures, v.LastError, v.LastErrorAt = 1, "the device is too small", timestamppb.New(now.Add(-time.Second))
	s.Apply(Watched{Changes: append(changed(v), syncedEvent)})
	id := v.GetId()
	shown := func() string { return s.node.volumes[id].err }
	s.Apply(answer(id, now))
	if shown() != "the device is too small" {
		t.Errorf("after an answer the volume's error is %q", shown())
	}
	s.Apply(StatsFetched{ID: id, At: now.Add(time.Second), Failure: "it hangs"})
	if shown() != "it hangs" || !s.node.volumes[id].failed {
		t.Errorf("after a failure the volume's error is %q", shown())
	}
	s.Apply(answer(id, now.Add(2*time.Second)))
	if shown() != "" || s.node.volumes[id].failed {
		t.Errorf("it answers again, and its error is %q", shown())
	}
}

func TestQuitAndSuspend(t *testing.T) {
	for _, keys := range [][]string{{"q"}, {"enter", "q"}, {"?", "q"}, {"ctrl+c"}, {"/", "q", "ctrl+c"}} {
		s := full(plainSettings(), 80, 24)
		if effects := press(s, keys...); len(effects) != 1 || effects[0] != (Quit{}) {
			t.Errorf("%v: %v", keys, effects)
		}
	}
	if effects := press(full(plainSettings(), 80, 24), "ctrl+z"); len(effects) != 1 || effects[0] != (Suspend{}) {
		t.Errorf("%v", effects)
	}
	s := full(plainSettings(), 80, 24)
	if press(s, "/", "q"); *s.list.filter.typed != "q" {
		t.Errorf("q does not type: %q", *s.list.filter.typed)
	}
}

func TestTimesOfStatsFitTheirColumn(t *testing.T) {
	for _, ascii := range []bool{false, true} {
		s := New(Settings{ASCII: ascii}, now)
		for d := time.Duration(0); d < 1000*time.Hour; d += 1 + d/7 {
			r := &row{asked: true, failed: true, took: d}
			if got := s.canvas.latency(r); cells(got) > columns[colStats].least {
				t.Errorf("%v is shown as %q", d, got)
			}
		}
	}
}

func TestBars(t *testing.T) {
	for _, c := range []struct {
		used, total int64
		want        string
	}{{0, 100, "──────────"}, {1, 1000, "╸─────────"}, {50, 100, "━━━━━─────"}, {54, 100, "━━━━━╸────"}, {100, 100, "━━━━━━━━━━"}, {300, 100, "━━━━━━━━━━"}, {1, 0, "╸─────────"}} {
		s := New(plainSettings(), now)
		if text := s.canvas.bar(&adminv1.VolumeUsage{Used: c.used, Total: c.total}, 10); text != c.want {
			t.Errorf("%d of %d: %s, want %s", c.used, c.total, text, c.want)
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
	if got := s.node.volumes[v.GetId()].history.errors; len(got) != 1 || got[0].times != 1 || got[0].text != "abnormal: read-only" {
		t.Errorf("%+v", got)
	}
	for i := range 2 * maxErrors {
		v := proto.CloneOf(v)
		v.LastError, v.LastErrorAt = fmt.Sprint("error ", i), timestamppb.New(now)
		s.Apply(Watched{Changes: changed(v)})
	}
	if got := s.node.volumes[v.GetId()].history.errors; len(got) != maxErrors || got[0].text != "error 9" {
		t.Errorf("%+v", got)
	}
}

// The help names no key that does nothing.
func TestKeysOfTheHelpAreBound(t *testing.T) {
	bound := []action{{binding: keyInterrupt}, {binding: keySuspend}, {binding: keyQuit}}
	bound = append(append(bound, listActions...), detailActions...)
	for line := range strings.Lines(helpKeys) {
		for _, name := range strings.FieldsFunc(line[:min(helpIndent, len(line)-1)], func(r rune) bool { return strings.ContainsRune(" ,;", r) }) {
			if !slices.ContainsFunc(bound, func(a action) bool { return key.Matches(Key{Name: name}, a.binding) }) {
				t.Errorf("%q does nothing", name)
			}
		}
	}
}
