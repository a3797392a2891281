package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Status is how a demand came out.
type Status string

// The statuses.
const (
	Pass Status = "PASS"
	Fail Status = "FAIL"
	// Skip: an optional part that the handler says it cannot do, or one that
	// could not be tried because of another one that failed.
	Skip Status = "SKIP"
)

// Result is the outcome of one demand.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Section is where docs/runtime-authors.md makes the demand, and Demand says it.
	Section string `json:"section"`
	Demand  string `json:"demand"`
	// Seen tells what was seen, unless it passed.
	Seen string `json:"seen,omitempty"`
}

// Report is all of them.
type Report struct {
	// Run is in the names of all containers that were made.
	Run     string   `json:"run"`
	Results []Result `json:"results"`
}

// Count tells how many came out so.
func (r Report) Count(status Status) int {
	n := 0
	for _, result := range r.Results {
		if result.Status == status {
			n++
		}
	}
	return n
}

// suite plays the scenes and notes what is seen.
type suite struct {
	opts   Options
	node   *node
	tell   func(Result)
	known  map[string]Status
	report Report
}

func (s *suite) wanted(name string) bool {
	return len(s.opts.Only) == 0 || slices.Contains(s.opts.Only, name)
}

// cannot is the handler's word that it cannot do an optional thing.
type cannot struct{ said string }

func (c cannot) Error() string { return c.said }

// check tries one demand, unless one that it needs has not passed. One of a scene
// that is not played is taken as met.
func (s *suite) check(ctx context.Context, name string, try func(context.Context) error, needs ...string) {
	if ctx.Err() != nil {
		return // what it needs may have been cut off
	}
	for _, need := range needs {
		if is, tried := s.known[need]; tried && is != Pass {
			s.note(name, Skip, "not tried, because "+need+" did not pass")
			return
		}
	}
	err := try(ctx)
	if ctx.Err() != nil {
		return // the operator's will is no fault of the handler
	}
	var said cannot
	switch {
	case err == nil:
		s.note(name, Pass, "")
	case errors.As(err, &said):
		s.note(name, Skip, "the handler says that it cannot: "+said.said)
	default:
		s.note(name, Fail, err.Error())
	}
}

func (s *suite) note(name string, status Status, seen string) {
	d := demandOf(name)
	result := Result{Name: name, Status: status, Section: d.section, Demand: d.text, Seen: seen}
	s.known[name] = status
	s.report.Results = append(s.report.Results, result)
	s.tell(result)
}

// want compares.
func want[T comparable](what string, got, wanted T) error {
	if got == wanted {
		return nil
	}
	return fmt.Errorf("%s is %v and should be %v", what, got, wanted)
}
