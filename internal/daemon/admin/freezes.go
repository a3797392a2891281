package admin

import (
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// freezes are the volumes that were frozen by this API since the daemon started. If nobody is left to thaw one, the
// condition in its stats says so.
type freezes struct{ known sync.Map } // of freeze, by volume.Key

type freeze struct{ since, until time.Time }

// note records the result of a freeze. Without an answer the volume may be frozen.
func (f *freezes) note(key volume.Key, is freeze, err error) {
	f.known.Range(func(other, was any) bool {
		if is, _ := was.(freeze); time.Now().After(is.until) {
			f.known.Delete(other)
		}
		return true
	})
	if kind := volume.KindOf(err); err == nil || kind == volume.Timeout || kind == volume.Canceled {
		f.known.Store(key, is)
	}
}

// noteThaw records the result of a thaw. InUse means that the volume was not frozen all the time; it is thawed now.
func (f *freezes) noteThaw(key volume.Key, err error) {
	if err == nil || volume.KindOf(err) == volume.InUse {
		f.known.Delete(key)
	}
}

// of returns the freeze of a volume, unless its time is over.
func (f *freezes) of(key volume.Key) (freeze, bool) {
	was, _ := f.known.Load(key)
	is, ok := was.(freeze)
	return is, ok && time.Now().Before(is.until)
}
