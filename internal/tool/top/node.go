package top

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// node is what the daemon reported, and whether it can be reached.
type node struct {
	escape  func(string) string
	volumes map[string]*row
	// unlisted are the volumes from before the watch broke that a new one has not listed.
	unlisted map[string]bool
	daemon   daemonInfo
	link     link
}

type link struct {
	synced bool
	away   bool
	since  time.Time
	retry  time.Time
	reason string
}

// watched applies changes and reports whether they complete the listing of the watch.
func (n *node) watched(e Watched, now time.Time) (synced bool) {
	for _, change := range e.Changes {
		id := change.GetVolume().GetId()
		switch change.GetType() {
		case adminv1.WatchVolumesResponse_TYPE_SYNCED:
			n.synced(now)
			synced = true
		case adminv1.WatchVolumesResponse_TYPE_REMOVED:
			delete(n.volumes, id)
		case adminv1.WatchVolumesResponse_TYPE_CHANGED:
			delete(n.unlisted, id)
			n.put(change.GetVolume(), now)
		}
	}
	return synced
}

func (n *node) put(v *adminv1.Volume, now time.Time) *row {
	r := newRow(v, n.escape)
	if old := n.volumes[r.id()]; old != nil {
		r.history = old.history
	}
	r.history.addError(r, now)
	n.volumes[r.id()] = r
	return r
}

// synced ends the listing of a new watch: volumes that it did not list are gone.
func (n *node) synced(now time.Time) {
	maps.DeleteFunc(n.volumes, func(id string, _ *row) bool { return n.unlisted[id] })
	clear(n.unlisted)
	n.link = link{synced: true, since: now}
}

func (n *node) disconnected(e Disconnected) {
	n.link = link{away: true, since: show.Either(n.link.away, n.link.since, e.At), retry: e.Retry, reason: n.escape(e.Reason)}
	for id := range n.volumes {
		n.unlisted[id] = true
	}
}

func (n *node) fetched(e StatsFetched, now time.Time) {
	old := n.volumes[e.ID]
	if old == nil {
		return // removed while the request was in flight
	}
	v := proto.CloneOf(old.v)
	if e.Reply != nil && statsFailed(v) && v.GetState() != adminv1.VolumeState_VOLUME_STATE_DEGRADED {
		v.LastError, v.LastErrorAt = "", nil // any other error outlives an answer
	}
	v.StatsAt, v.StatsTook = timestamppb.New(e.At), durationpb.New(e.Took)
	v.StatsRequests++
	if e.Reply == nil {
		v.StatsFailures++
		v.LastError, v.LastErrorAt = e.Failure, timestamppb.New(e.At)
	} else {
		v.Usage, v.UsageAt, v.Condition = e.Reply.GetUsage(), v.GetStatsAt(), e.Reply.GetCondition()
	}
	r := n.put(v, now)
	samples := append(slices.Clip(r.history.took), sample{took: e.Took, failed: e.Reply == nil})
	r.history.took = samples[max(0, len(samples)-maxSamples):]
}

func (n *node) polled(e Polled, now time.Time) {
	n.daemon.update(e, n.escape)
	for _, v := range e.Volumes {
		n.updateStats(v, now)
	}
}

// clockSlack is how much later than the daemon we see an answer end.
const clockSlack = 500 * time.Millisecond

// updateStats copies from a listing the numbers, which the watch does not report. The rest of the listing may be older
// than the watch. The numbers too may be older than an answer that came since.
func (n *node) updateStats(v *adminv1.Volume, now time.Time) {
	old := n.volumes[v.GetId()]
	if old == nil || timeOf(v.GetStatsAt()).Add(clockSlack).Before(timeOf(old.v.GetStatsAt())) {
		return
	}
	merged := proto.CloneOf(old.v)
	merged.Usage, merged.UsageAt, merged.Condition = v.GetUsage(), v.GetUsageAt(), v.GetCondition()
	merged.LastError, merged.LastErrorAt = v.GetLastError(), v.GetLastErrorAt()
	merged.StatsTook, merged.StatsAt = v.GetStatsTook(), v.GetStatsAt()
	merged.StatsRequests, merged.StatsFailures = v.GetStatsRequests(), v.GetStatsFailures()
	n.put(merged, now)
}

// daemonInfo is what the daemon reports of itself and its parts, escaped.
type daemonInfo struct {
	host, name, version string
	started             time.Time
	concurrency         int  // of the relay; 0 is unknown
	checked             bool // the numbers of handlers and drivers are known
	handlers, drivers   tally
	frontEnabled        bool
	problems            []string
}

type tally struct{ fine, all int }

// update copies what the daemon reported, and keeps what it did not report.
func (d *daemonInfo) update(e Polled, escape func(string) string) {
	if e.Node != nil {
		d.version, d.started = escape(e.Node.GetVersion()), timeOf(e.Node.GetStartedAt())
		d.configure(e.Node.GetConfig(), escape)
	}
	if e.Handlers == nil && e.Drivers == nil {
		return
	}
	d.checked, d.frontEnabled, d.problems = true, e.Drivers.GetFrontEnabled(), nil
	d.handlers, d.drivers = tally{}, tally{}
	count := func(t *tally, fine bool, problem string) {
		if t.all++; fine {
			t.fine++
			return
		}
		d.problems = append(d.problems, escape(problem))
	}
	for _, h := range e.Handlers {
		count(&d.handlers, h.GetHealthy(), "handler "+h.GetName()+": "+h.GetProblem())
	}
	for _, driver := range e.Drivers.GetDrivers() {
		count(&d.drivers, driver.GetReady() && driver.GetProblem() == "", "driver "+driver.GetName()+": "+driver.GetProblem())
	}
	findings := sys.Map(e.Node.GetFindings(), escape)
	if e.Node.GetConfigBadSince() != nil { // the screen shows only the first, and this is the first finding
		d.problems = append(findings, d.problems...)
	} else {
		d.problems = append(d.problems, findings...)
	}
}

// configure ignores a configuration of another version that cannot be read.
func (d *daemonInfo) configure(text string, escape func(string) string) {
	var config struct {
		Cluster struct{ NodeName string }
		Relay   struct{ Concurrency int }
	}
	if yaml.Unmarshal([]byte(text), &config) == nil {
		d.name, d.concurrency = cmp.Or(escape(config.Cluster.NodeName), d.host), config.Relay.Concurrency
	}
}

const (
	maxErrors  = 5
	maxSamples = 60
)

// history is what was seen of a volume since crustctl top runs. A row's slices never
// change: those of the next row are new.
type history struct {
	errors []pastError // the newest first
	took   []sample
}

type pastError struct {
	text  string
	last  time.Time
	times int
}

type sample struct {
	took   time.Duration
	failed bool
}

// addError adds the error that a row shows. An error seen before counts again if it
// happened again: a condition persists and has no time of its own.
func (h *history) addError(r *row, now time.Time) {
	if r.err == "" {
		return
	}
	at, again := timeOf(r.v.GetLastErrorAt()), 1
	if at.IsZero() {
		at, again = now, 0
	}
	if len(h.errors) == 0 || h.errors[0].text != r.err {
		h.errors = append([]pastError{{text: r.err, last: at, times: 1}}, h.errors...)
		h.errors = h.errors[:min(len(h.errors), maxErrors)]
		return
	}
	if newest := h.errors[0]; at.After(newest.last) {
		newest.last, newest.times = at, newest.times+again
		h.errors = append([]pastError{newest}, h.errors[1:]...)
	}
}

// row is a volume as it is shown. It never changes, so that a paused screen can keep
// it. Its texts are escaped: they come from other programs and from guests.
type row struct {
	v *adminv1.Volume

	name, pod, state, driver, handler, sandbox, err string
	size                                            string
	bytes, inodes                                   *adminv1.VolumeUsage // nil is unknown
	took                                            time.Duration
	asked, failed                                   bool
	created                                         time.Time
	words                                           string // what a filter searches, in lower case
	history                                         history
}

func part(u *adminv1.VolumeUsage) float64 {
	if u.GetTotal() <= 0 {
		return 0
	}
	return min(1, max(0, float64(u.GetUsed())/float64(u.GetTotal())))
}

func (r *row) id() string { return r.v.GetId() }

// timed reports whether the time of the last answer is shown. Without a sandbox it is that of another one, or of a failure
// that the daemon keeps to itself.
func (r *row) timed() bool { return r.asked && (r.failed || r.v.GetSandbox() != nil) }

func (r *row) hasSandbox() bool { return r.v.GetSandbox().GetId() != "" }

func newRow(v *adminv1.Volume, escape func(string) string) *row {
	r := &row{
		v: v, name: escape(show.VolumeName(v)), pod: escape(show.ShortPod(v)), state: show.StateName(v.GetState()),
		driver: escape(v.GetDriver()), handler: escape(v.GetHandler()),
		sandbox: escape(show.ShortID(v.GetSandbox().GetId())), err: escape(errorOf(v)),
		bytes: show.Usage(v, adminv1.VolumeUsage_UNIT_BYTES), inodes: show.Usage(v, adminv1.VolumeUsage_UNIT_INODES),
		took: v.GetStatsTook().AsDuration(), asked: v.GetStatsAt() != nil,
		failed: statsFailed(v), created: timeOf(v.GetCreatedAt()),
	}
	r.size = show.When(r.bytes != nil, sizes(r.bytes))
	r.words = strings.ToLower(strings.Join([]string{
		r.name, r.pod, r.state, r.driver, r.handler, r.err, escape(v.GetSandbox().GetId()), v.GetId(),
		escape(v.GetTargetPath()), escape(v.GetDevice()), escape(v.GetVolumeId()), escape(v.GetPodUid()),
	}, "\n"))
	return r
}

// sizes shows used and total, with one unit if it is the same.
func sizes(u *adminv1.VolumeUsage) string {
	used, total := show.Size(u.GetUsed()), show.Size(u.GetTotal())
	if unit := strings.TrimLeft(total, "0123456789."); strings.TrimLeft(used, "0123456789.") == unit {
		used = strings.TrimSuffix(used, unit)
	}
	return used + "/" + total
}

// statsFailed reports whether the error is that of the last request for stats: both then have the same time.
func statsFailed(v *adminv1.Volume) bool {
	return v.GetLastError() != "" && v.GetStatsFailures() > 0 && timeOf(v.GetLastErrorAt()).Equal(timeOf(v.GetStatsAt()))
}

func timeOf(t *timestamppb.Timestamp) time.Time { return show.When(t != nil, t.AsTime()) }

// errorOf is what is wrong with the volume, without the volume's name.
func errorOf(v *adminv1.Volume) string {
	return cmp.Or(strings.TrimPrefix(v.GetLastError(), "volume "+v.GetTargetPath()+": "),
		show.When(v.GetCondition().GetAbnormal(), "abnormal: "+v.GetCondition().GetMessage()))
}
