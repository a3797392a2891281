package conformance

import (
	"errors"
	"fmt"
)

// Status is the outcome of a requirement.
type Status string

// The statuses.
const (
	Pass Status = "PASS"
	Fail Status = "FAIL"
	// Skip: the handler says that it cannot do an optional part, or the requirement
	// could not be tested because another one failed.
	Skip Status = "SKIP"
)

// Result is the outcome of one requirement.
type Result struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Section is the section of docs/runtime-authors.md that has the requirement, and
	// Demand is its text.
	Section string `json:"section"`
	Demand  string `json:"demand"`
	// Seen is what was seen, unless it passed.
	Seen string `json:"seen,omitempty"`
}

// Report has the results of a run.
type Report struct {
	// Run is in the names of all containers that were made.
	Run     string   `json:"run"`
	Results []Result `json:"results"`
}

// Count counts the results with a status.
func (r Report) Count(status Status) int {
	n := 0
	for _, result := range r.Results {
		if result.Status == status {
			n++
		}
	}
	return n
}

// suite runs the test cases and collects the results.
type suite struct {
	node     *node
	onResult func(Result)
	statuses map[string]Status // by requirement
	report   Report
}

// unsupported is the handler's answer that it cannot do an optional thing.
type unsupported struct{ reason string }

func (u unsupported) Error() string { return u.reason }

// check tests one requirement, unless one that it needs has not passed. A requirement of
// a test case that was not run counts as met.
func (s *suite) check(t *trial, name string, test func(*trial), needs ...string) {
	if t.ctx.Err() != nil {
		return // what it needs may have been cut off
	}
	for _, need := range needs {
		if is, tested := s.statuses[need]; tested && is != Pass {
			s.record(name, Skip, "not tried, because "+need+" did not pass")
			return
		}
	}
	err := try(t.ctx, test)
	if t.ctx.Err() != nil {
		return // an interrupt is no fault of the handler
	}
	var cannot unsupported
	switch {
	case err == nil:
		s.record(name, Pass, "")
	case errors.As(err, &cannot):
		s.record(name, Skip, "the handler says that it cannot: "+cannot.reason)
	default:
		s.record(name, Fail, err.Error())
	}
}

func (s *suite) record(name string, status Status, seen string) {
	r := requirements()[name]
	result := Result{Name: name, Status: status, Section: r.section, Demand: r.text, Seen: seen}
	s.statuses[name] = status
	s.report.Results = append(s.report.Results, result)
	s.onResult(result)
}

// want compares.
func want[T comparable](what string, got, wanted T) error {
	if got == wanted {
		return nil
	}
	return fmt.Errorf("%s is %v and should be %v", what, got, wanted)
}
