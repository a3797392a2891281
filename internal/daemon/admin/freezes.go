package admin

import (
	"maps"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// freezes are the volumes that were frozen by this API since the daemon started. If nobody is left to thaw one, the
// condition in its stats says so.
type freezes struct {
	mu       sync.Mutex
	known    map[volume.Key]freeze
	underWay map[volume.Key]int
}

// begin counts a freeze as under way until note.
func (f *freezes) begin(key volume.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known, f.underWay = make(map[volume.Key]freeze), make(map[volume.Key]int)
	}
	f.underWay[key]++
}

// freeze is of the filesystem in one sandbox, which is empty if it is not known whether that is frozen.
type freeze struct {
	since, until time.Time
	sandbox      string
	sure         bool // its caller knows of it, and thaws it
}

// note records the result of a freeze. Without an answer the volume may be frozen. It reports whether nobody else
// knows of a freeze or may get to know, so that the volume is to be thawed.
func (f *freezes) note(key volume.Key, is freeze, err error) (orphaned bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.underWay[key]--; f.underWay[key] == 0 {
		delete(f.underWay, key)
	}
	maps.DeleteFunc(f.known, func(_ volume.Key, was freeze) bool { return time.Now().After(was.until) })
	if is.sure = err == nil; !is.sure {
		is.sandbox = ""
	}
	kind := volume.KindOf(err)
	if is.sure || (kind == volume.Timeout || kind == volume.Canceled) && !f.known[key].sure {
		f.known[key] = is
	}
	left, isKnown := f.known[key]
	return isKnown && !left.sure && f.underWay[key] == 0
}

// thawTime bounds the thaw of a freeze that was cut off.
const thawTime = 10 * time.Second

// noteThaw records the result of a thaw. InUse means that the volume was not frozen all the time; it is thawed now.
// NoSandbox means that whoever was frozen has ended.
func (f *freezes) noteThaw(key volume.Key, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if kind := volume.KindOf(err); err == nil || kind == volume.InUse || kind == volume.NoSandbox {
		delete(f.known, key)
	}
}

// of returns the freeze of a volume, unless its time is over.
func (f *freezes) of(key volume.Key) (freeze, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	is := f.known[key]
	return is, time.Now().Before(is.until)
}
