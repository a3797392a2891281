package main

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// figure is one line of the page.
type figure struct {
	what, value, target string
	met                 bool
}

// sheet collects the figures.
type sheet struct{ all []figure }

// atMost notes a value that shall be small.
func (s *sheet) atMost(what, target string, value, limit float64, text string) {
	s.add(figure{what, text, target, value <= limit})
}

// atLeast notes a value that shall be large.
func (s *sheet) atLeast(what, target string, value, limit float64, text string) {
	s.add(figure{what, text, target, value >= limit})
}

// tell notes a value without a target.
func (s *sheet) tell(what, text string) { s.add(figure{what, text, "", true}) }

func (s *sheet) add(f figure) {
	s.all = append(s.all, f)
	mark := "ok  "
	if !f.met {
		mark = "MISS"
	}
	fmt.Printf("%s %-64s %-28s %s\n", mark, f.what, f.value, f.target)
}

// ratio notes how much longer something took than what it is compared with.
func (s *sheet) ratio(what, target string, value, unit time.Duration, limit float64) {
	ratio := float64(value) / float64(unit)
	s.atMost(what, target, ratio, limit, fmt.Sprintf("%.2fx (%s)", ratio, micros(value)))
}

// mib notes a size.
func (s *sheet) mib(what, target string, bytes, limit float64) {
	mib := bytes / mib
	s.atMost(what, target, mib, limit, fmt.Sprintf("%.1f MiB", mib))
}

func micros(d time.Duration) string { return fmt.Sprintf("%.0f us", float64(d.Nanoseconds())/1000) }

func millis(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

// durations is a sample.
type durations []time.Duration

func (d durations) p99() time.Duration { return d.sorted()[len(d)*99/100] }

func (d durations) sorted() durations { return slices.Sorted(slices.Values(d)) }

func median[V cmp.Ordered](values []V) V { return slices.Sorted(slices.Values(values))[len(values)/2] }

// inTurns gives the median of each way. The ways take turns, so that whatever else the
// machine does hits all of them.
func inTurns[V cmp.Ordered](rounds int, ways ...func() V) []V {
	all, medians := make([][]V, len(ways)), make([]V, len(ways))
	for range rounds {
		for i, way := range ways {
			all[i] = append(all[i], way())
		}
	}
	for i := range all {
		medians[i] = median(all[i])
	}
	return medians
}

// timed measures calls, which take turns: each is made so many times in a round.
func (r *testbed) timed(rounds, times int, calls ...func() error) []durations {
	all := make([]durations, len(calls))
	for range rounds {
		for i, call := range calls {
			for range times {
				start := time.Now()
				r.must(call())
				all[i] = append(all[i], time.Since(start))
			}
		}
	}
	return all
}

const endMark = "<!-- end of figures -->"

// write puts the table between the marks of the page that name the command.
func (s *sheet) write(path, command string) error {
	beginMark := "<!-- figures: written by " + command + " -->"
	raw, err := os.ReadFile(path) //nolint:gosec // the page that the flag names
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(raw), beginMark)
	_, after, ok2 := strings.Cut(rest, endMark)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no marks for the figures", path)
	}
	var table strings.Builder
	fmt.Fprintf(&table, "%s\n\nMeasured on %d cores, Linux %s, %s, on %s.\n\n| figure | measured | target | met |\n| --- | --- | --- | --- |\n",
		beginMark, runtime.NumCPU(), kernel(), runtime.Version(), time.Now().Format("2006-01-02"))
	for _, f := range s.all {
		met := "yes"
		if f.target == "" {
			met = ""
		} else if !f.met {
			met = "**no**"
		}
		fmt.Fprintf(&table, "| %s | %s | %s | %s |\n", f.what, f.value, f.target, met)
	}
	return os.WriteFile(path, []byte(before+table.String()+"\n"+endMark+after), 0o644) //nolint:gosec // a page to be read
}

// kernel is the release without its local part.
func kernel() string {
	raw, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "?"
	}
	release, _, _ := strings.Cut(strings.TrimSpace(string(raw)), "-")
	return release
}
