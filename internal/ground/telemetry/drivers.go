package telemetry

import (
	"sync"
	"unicode/utf8"
)

// maxDrivers bounds how many driver names become label values, because the names come from
// outside. All further ones are counted as otherDriver.
const maxDrivers = 64

// maxDriverName is the longest name that CSI allows.
const maxDriverName = 63

const (
	noDriver    = "unknown"
	otherDriver = "other"
)

type drivers struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (d *drivers) label(name string) string {
	if name == "" {
		return noDriver
	}
	if len(name) > maxDriverName || !utf8.ValidString(name) {
		return otherDriver
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seen[name] {
		return name
	}
	if len(d.seen) >= maxDrivers {
		return otherDriver
	}
	if d.seen == nil {
		d.seen = make(map[string]bool)
	}
	d.seen[name] = true
	return name
}
