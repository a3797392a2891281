// Package history keeps what happened to the volumes of this node: in memory, and in a file of the run directory, so
// that it survives a restart and, but for the last moment, a kill of the daemon. An event never fails a call, and no
// call waits for the file.
package history

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// What is kept. Of too many events, evicted decides which are forgotten.
const (
	mostEvents    = 10000
	mostPerVolume = 50
	mostAge       = 7 * 24 * time.Hour
	mostText      = 512
	mostBytes     = 64 << 20 // of the file: mostEvents of the longest have less
)

const (
	// pause is the least time before each write; they take a twentieth of the time at most.
	pause = 100 * time.Millisecond
	// failedPause is the least time after a write that failed.
	failedPause = time.Second
	// leaveFree is what is left to the records, which are on the same filesystem.
	leaveFree = 16 << 20
)

// History has the events of this node's volumes.
type History struct {
	path    string
	observe func(*adminv1.VolumeEvent) // may be nil
	log     *zap.Logger
	wake    chan struct{} // has a token while an event is not in the file
	quit    chan struct{}
	writer  sync.WaitGroup

	mu sync.Mutex
	// volumes has the events of each volume, by its name (see nameOf), the oldest first. An event is
	// never changed: readers have it without the lock.
	volumes map[string][]*adminv1.VolumeEvent
	last    uint64 // the number of the newest event
}

// Open reads what an earlier process has kept in the state directory. Close ends it. The function observe, which may be
// nil, is called for each event, and must not block.
func Open(stateDir string, observe func(*adminv1.VolumeEvent), log *zap.Logger) *History {
	h := &History{
		path: path.Join(stateDir, "events.pb"), observe: observe, log: log, wake: make(chan struct{}, 1), quit: make(chan struct{}),
		volumes: make(map[string][]*adminv1.VolumeEvent),
	}
	kept, err := readFile(h.path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Warn("earlier events of volumes cannot be read", zap.Error(err))
	}
	for _, e := range kept.GetEvents() {
		h.put(e)
	}
	h.prune()
	h.writer.Go(h.write)
	return h
}

func readFile(path string) (*adminv1.ListEventsResponse, error) {
	raw, err := sys.ReadSmall(path, mostBytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	kept := &adminv1.ListEventsResponse{}
	return kept, proto.Unmarshal(raw, kept)
}

// Close writes what is not written yet.
func (h *History) Close() {
	close(h.quit)
	h.writer.Wait()
}

// Add records that something happened now. A failure or a repair that repeats one of the volume's latest is counted
// with it.
func (h *History) Add(e *adminv1.VolumeEvent) {
	e.Text, e.TargetPath = sys.ClipTo(refusal.OneLine(e.GetText()), mostText), strings.ToValidUTF8(sys.ClipTo(e.GetTargetPath(), 1024), "?")
	e.Count, e.LastAt = 1, timestamppb.Now()
	e.FirstAt = e.GetLastAt()
	h.mu.Lock()
	e.Number = h.last + 1
	of := h.volumes[nameOf(e)]
	if i := repeated(of, e); i >= 0 {
		e.Count, e.FirstAt = of[i].GetCount()+1, of[i].GetFirstAt()
		h.volumes[nameOf(e)] = slices.Delete(of, i, i+1)
	}
	h.put(e)
	h.mu.Unlock()
	sys.Wake(h.wake)
	if h.observe != nil {
		h.observe(e)
	}
}

func (h *History) put(e *adminv1.VolumeEvent) {
	h.last = e.GetNumber()
	of := h.volumes[nameOf(e)]
	of = append(of, e)
	if len(of) > mostPerVolume {
		gone := evicted(of, mostPerVolume)
		of = slices.DeleteFunc(of, func(e *adminv1.VolumeEvent) bool { return gone[e] })
	}
	h.volumes[nameOf(e)] = of
}

// write writes the file after each pause, so that the events of a pod's start are written together, and not during its calls.
func (h *History) write() {
	next, failed := time.Now(), false
	for open := true; open; {
		select {
		case <-h.wake:
		case _, open = <-h.quit:
		}
		select {
		case <-time.After(max(pause, time.Until(next))):
		case <-h.quit:
		}
		start := time.Now()
		err := h.writeFile(h.prune())
		rest := 19 * time.Since(start)
		if err != nil && !failed {
			h.log.Warn("events of volumes are kept in memory only", zap.Error(err))
		}
		if failed = err != nil; failed {
			rest = max(rest, failedPause)
			sys.Wake(h.wake)
		}
		next = time.Now().Add(rest)
	}
}

// prune forgets the events that are too old or too many, and returns the others, the oldest first.
func (h *History) prune() []*adminv1.VolumeEvent {
	all, gone := h.of(nil)
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, of := range h.volumes {
		of = slices.DeleteFunc(of, func(e *adminv1.VolumeEvent) bool { return gone[e] })
		if h.volumes[name] = of; len(of) == 0 {
			delete(h.volumes, name)
		}
	}
	return all
}

// evicted returns which events, of those from the oldest to the newest, are too old or over the limit: refusals first,
// which are as many as a tenant pleases; then releases by hand; last, and never for its age, which sandbox has a volume
// that is still there.
func evicted(all []*adminv1.VolumeEvent, most int) map[*adminv1.VolumeEvent]bool {
	if len(all) <= most && !slices.ContainsFunc(all, tooOld) {
		return nil
	}
	ranks, later := make(map[*adminv1.VolumeEvent]int, len(all)), make(map[string]bool)
	for _, e := range slices.Backward(all) {
		id := cmp.Or(e.GetTargetPath(), e.GetId()) // a repeated call may have no id
		switch e.GetWhat() {
		case Refused:
		case released:
			ranks[e], later[id] = 2, true
		case bound, unbound:
			if ranks[e] = 3; later[id] {
				ranks[e] = 1
			}
			later[id] = true
		case unpublished:
			ranks[e], later[id] = 1, true
		default:
			ranks[e] = 1
		}
	}
	order := slices.Clone(all)
	slices.SortStableFunc(order, func(a, b *adminv1.VolumeEvent) int { return cmp.Compare(ranks[a], ranks[b]) })
	gone := make(map[*adminv1.VolumeEvent]bool)
	for i, e := range order {
		if i < len(all)-most || tooOld(e) && ranks[e] < 3 {
			gone[e] = true
		}
	}
	return gone
}

func tooOld(e *adminv1.VolumeEvent) bool {
	return e.GetLastAt().GetSeconds() < time.Now().Add(-mostAge).Unix()
}

func (h *History) writeFile(events []*adminv1.VolumeEvent) error {
	raw, err := proto.Marshal(&adminv1.ListEventsResponse{Events: events})
	if err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path.Dir(h.path), &fs); err != nil {
		return err
	}
	if fs.Bavail*uint64(fs.Bsize) < uint64(len(raw))+leaveFree { //nolint:gosec // no block has a negative size
		return errors.New("the filesystem of the run directory is almost full")
	}
	return sys.WriteSynced(h.path, raw)
}

// List returns the newest events of the volumes that have an event which is one of those, the newest first.
func (h *History) List(is func(*adminv1.VolumeEvent) bool, limit int) []*adminv1.VolumeEvent {
	found, _ := h.of(is)
	slices.Reverse(found)
	return found[:min(limit, len(found))]
}

// of returns the events of the volumes with one that is wanted, or of all for nil: the oldest first, and without those
// that are to be forgotten.
func (h *History) of(is func(*adminv1.VolumeEvent) bool) (found []*adminv1.VolumeEvent, gone map[*adminv1.VolumeEvent]bool) {
	h.mu.Lock()
	for _, of := range h.volumes {
		if is == nil || slices.ContainsFunc(of, is) {
			found = append(found, of...)
		}
	}
	h.mu.Unlock()
	slices.SortFunc(found, func(a, b *adminv1.VolumeEvent) int { return cmp.Compare(a.GetNumber(), b.GetNumber()) })
	gone = evicted(found, mostEvents)
	return slices.DeleteFunc(found, func(e *adminv1.VolumeEvent) bool { return gone[e] }), gone
}

// repeated returns the place of the event that a failure or a repair repeats, or -1. Between them are only such: kubelet
// repeats a call, and may get one error and another in turn; a repair may be undone and made again every minute.
func repeated(of []*adminv1.VolumeEvent, e *adminv1.VolumeEvent) int {
	for i, old := range slices.Backward(of) {
		if e.GetFailed() != old.GetFailed() || !e.GetFailed() && (e.GetWhat() != Repaired[0] || old.GetWhat() != Repaired[0]) {
			break
		}
		if old.GetWhat() == e.GetWhat() && old.GetText() == e.GetText() && old.GetBy() == e.GetBy() && old.GetTargetPath() == e.GetTargetPath() {
			return i
		}
	}
	return -1
}

// nameOf is the CSI volume, which is staged before it has a target; else the id, or a target that was refused.
func nameOf(e *adminv1.VolumeEvent) string {
	if e.GetVolumeId() != "" {
		return e.GetDriver() + "/" + e.GetVolumeId()
	}
	return cmp.Or(e.GetId(), e.GetTargetPath())
}
