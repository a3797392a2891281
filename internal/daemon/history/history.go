// Package history keeps what happened to the volumes of this node: in memory, and in a file of the run directory, so
// that it survives a restart and, but for the last moment, a kill of the daemon. An event never fails a call, and no
// call waits for the file.
package history

import (
	"cmp"
	"errors"
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

// What is kept. Of too many events, the oldest are forgotten.
const (
	mostEvents    = 10000
	mostPerVolume = 50
	mostAge       = 7 * 24 * time.Hour
	mostText      = 512
)

const (
	// pause is the least time between two writes; they take a twentieth of the time at most.
	pause = 100 * time.Millisecond
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
	raw, err := os.ReadFile(h.path)
	kept := &adminv1.ListEventsResponse{}
	if err = cmp.Or(err, proto.Unmarshal(raw, kept)); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.Warn("earlier events of volumes cannot be read", zap.Error(err))
	}
	for _, e := range kept.GetEvents() {
		h.put(e)
	}
	h.writer.Go(h.write)
	return h
}

// Close writes what is not written yet.
func (h *History) Close() {
	close(h.quit)
	h.writer.Wait()
}

// Add records that something happened now. A failure that repeats one of the volume's latest is counted with it.
func (h *History) Add(e *adminv1.VolumeEvent) {
	e.Text, e.TargetPath = sys.ClipTo(refusal.OneLine(e.GetText()), mostText), strings.ToValidUTF8(sys.ClipTo(e.GetTargetPath(), 1024), "?")
	e.Count, e.LastAt = 1, timestamppb.Now()
	e.FirstAt = e.GetLastAt()
	h.mu.Lock()
	h.last++
	e.Number = h.last
	of := h.volumes[nameOf(e)]
	if i := repeated(of, e); i >= 0 {
		e.Count, e.FirstAt = of[i].GetCount()+1, of[i].GetFirstAt()
		h.volumes[nameOf(e)] = slices.Delete(of, i, i+1)
	}
	h.put(e)
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
	if h.observe != nil {
		h.observe(e)
	}
}

// put adds the newest event.
func (h *History) put(e *adminv1.VolumeEvent) {
	h.last = e.GetNumber()
	of := h.volumes[nameOf(e)]
	of = append(of, e)
	h.volumes[nameOf(e)] = slices.Delete(of, 0, max(0, len(of)-mostPerVolume))
}

// write keeps the file up to date until Close.
func (h *History) write() {
	failed := false
	for open := true; open; {
		select {
		case <-h.wake:
		case <-h.quit:
			open = false
		}
		start := time.Now()
		err := h.writeFile(h.prune())
		if err != nil && !failed {
			h.log.Warn("events of volumes are kept in memory only", zap.Error(err))
		}
		failed = err != nil
		select {
		case <-time.After(max(pause, 19*time.Since(start))):
		case <-h.quit:
		}
	}
}

// prune forgets the events that are too old or too many, and returns the others, the oldest first.
func (h *History) prune() []*adminv1.VolumeEvent {
	all := h.of(every)
	if all = all[max(0, len(all)-mostEvents):]; len(all) == 0 {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for name, of := range h.volumes {
		of = slices.DeleteFunc(of, func(e *adminv1.VolumeEvent) bool { return e.GetNumber() < all[0].GetNumber() })
		if h.volumes[name] = of; len(of) == 0 {
			delete(h.volumes, name)
		}
	}
	return all
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
	if err = os.WriteFile(h.path+".new", raw, 0o600); err == nil {
		err = os.Rename(h.path+".new", h.path)
	}
	return err
}

// List returns the newest events of the volumes that have an event which is one of those, the newest first.
func (h *History) List(is func(*adminv1.VolumeEvent) bool, limit int) []*adminv1.VolumeEvent {
	found := h.of(is)
	slices.Reverse(found)
	return found[:min(limit, len(found))]
}

func every(*adminv1.VolumeEvent) bool { return true }

func (h *History) of(is func(*adminv1.VolumeEvent) bool) []*adminv1.VolumeEvent {
	var found []*adminv1.VolumeEvent
	h.mu.Lock()
	for _, of := range h.volumes {
		if slices.ContainsFunc(of, is) {
			found = append(found, of...)
		}
	}
	h.mu.Unlock()
	since := time.Now().Add(-mostAge).Unix()
	found = slices.DeleteFunc(found, func(e *adminv1.VolumeEvent) bool { return e.GetLastAt().GetSeconds() < since })
	slices.SortFunc(found, func(a, b *adminv1.VolumeEvent) int { return cmp.Compare(a.GetNumber(), b.GetNumber()) })
	return found
}

// repeated returns the place of the event that a failure repeats, or -1. Between them are only failures: kubelet
// repeats a call, and may get one error and another in turn.
func repeated(of []*adminv1.VolumeEvent, e *adminv1.VolumeEvent) int {
	for i, old := range slices.Backward(of) {
		if !e.GetFailed() || !old.GetFailed() {
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
