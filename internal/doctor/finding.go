// Package doctor looks at one node and says what would keep deferred volumes
// from working on it. Every check is a small function over a Node, whose paths
// are injected, and what the daemon said, which may be nothing.
package doctor

import (
	"fmt"
	"strings"
)

// Severity says how bad a finding is.
type Severity string

// The severities.
const (
	OK    Severity = "ok"
	Warn  Severity = "warn"
	Error Severity = "error"
)

// Finding is one thing that was looked at. Seen and Do may quote files and
// sandboxes: whoever prints them to a terminal escapes them.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	// Seen is what was found.
	Seen string `json:"seen"`
	// Do is what to do about it; empty where there is nothing to do.
	Do string `json:"do,omitempty"`
}

// Report is all that one run found, in the order of the checks.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Count counts the findings of a severity.
func (r Report) Count(s Severity) int {
	n := 0
	for _, f := range r.Findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

func okay(format string, args ...any) Finding {
	return Finding{Severity: OK, Seen: fmt.Sprintf(format, args...)}
}

func warning(do, format string, args ...any) Finding {
	return Finding{Severity: Warn, Seen: fmt.Sprintf(format, args...), Do: do}
}

func failure(do, format string, args ...any) Finding {
	return Finding{Severity: Error, Seen: fmt.Sprintf(format, args...), Do: do}
}

// orOK gives the findings, or the one that says all is well where there are none.
func orOK(found []Finding, format string, args ...any) []Finding {
	if len(found) > 0 {
		return found
	}
	return []Finding{okay(format, args...)}
}

// quoted makes a name safe in the commands that we advise: it may have been
// chosen by somebody who hopes that they are pasted into root's shell.
func quoted(name string) string {
	const safe = "/._-=+:,@%abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	if name != "" && name[0] != '-' && strings.Trim(name, safe) == "" {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}
