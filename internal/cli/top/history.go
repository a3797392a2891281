package top

import "time"

const (
	maxErrors  = 5
	maxSamples = 60
)

// history is what was seen of a volume since crustctl top runs.
type history struct {
	errors []pastError // the newest first
	took   []sample
}

// pastError is an error, and when and how often it was seen.
type pastError struct {
	text  string
	last  time.Time
	times int
}

// sample is one request for stats.
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
	if newest := &h.errors[0]; at.After(newest.last) {
		newest.last = at
		newest.times += again
	}
}

func (h *history) addSample(s sample) {
	h.took = append(h.took, s)
	h.took = h.took[max(0, len(h.took)-maxSamples):]
}
