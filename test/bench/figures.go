package main

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// figure is one line of the page.
type figure struct {
	part, what, value, target, on string
	met                           bool
}

// sheet collects the figures of a part.
type sheet struct {
	all  []figure
	part string
	// slack is what limits are multiplied by.
	slack float64
}

// atMost notes a value that shall be small.
func (s *sheet) atMost(what, target string, value, limit float64, text string) {
	s.add(figure{what: what, value: text, target: target, met: value <= limit*s.slack})
}

// atLeast notes a value that shall be large.
func (s *sheet) atLeast(what, target string, value, limit float64, text string) {
	s.add(figure{what: what, value: text, target: target, met: value >= limit/s.slack})
}

// tell notes a value without a target.
func (s *sheet) tell(what, text string) { s.add(figure{what: what, value: text, met: true}) }

func (s *sheet) add(f figure) {
	f.part, f.on = s.part, time.Now().Format("2006-01-02")
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
	s.atMost(what, target, ratio, limit, fmt.Sprintf("%.2fx (%s)", ratio, short(value)))
}

// ratio is how much longer something takes than another.
type ratio struct {
	what        string
	value, unit time.Duration
	limit       float64
}

// ratios notes several in one row.
func (s *sheet) ratios(what, value string, all ...ratio) {
	f := figure{what: what, value: value, met: true}
	var goals []string
	for _, one := range all {
		times := float64(one.value) / float64(one.unit)
		f.value += fmt.Sprintf(", %.2fx %s", times, one.what)
		f.met = f.met && times <= one.limit*s.slack
		if goal := fmt.Sprintf("<= %gx", one.limit); !math.IsInf(one.limit, 1) && !slices.Contains(goals, goal) {
			goals = append(goals, goal)
		}
	}
	f.target = strings.Join(goals, ", ")
	s.add(f)
}

// mib notes a size.
func (s *sheet) mib(what, target string, bytes, limit float64) {
	mib := bytes / mib
	s.atMost(what, target, mib, limit, fmt.Sprintf("%.1f MiB", mib))
}

// short is micros where that is easy to read.
func short(d time.Duration) string {
	if d < 10*time.Millisecond {
		return micros(d)
	}
	return millis(d)
}

func micros(d time.Duration) string { return fmt.Sprintf("%.0f us", float64(d.Nanoseconds())/1000) }

func millis(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

type durations []time.Duration

func (d durations) p99() time.Duration { return d.sorted()[len(d)*99/100] }

func (d durations) sorted() durations { return slices.Sorted(slices.Values(d)) }

func median[V cmp.Ordered](values []V) V { return slices.Sorted(slices.Values(values))[len(values)/2] }

// turns measures each way so many times. The ways take turns, so that whatever else the machine does hits all of them.
func turns[V any](rounds int, ways ...func() V) [][]V {
	all := make([][]V, len(ways))
	for range rounds {
		for i, way := range ways {
			all[i] = append(all[i], way())
		}
	}
	return all
}

// inTurns gives the median of each way.
func inTurns[V cmp.Ordered](rounds int, ways ...func() V) []V {
	medians := make([]V, len(ways))
	for i, values := range turns(rounds, ways...) {
		medians[i] = median(values)
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

const (
	endMark = "<!-- end of figures -->"
	columns = "| part | figure | measured | goal | met | on |"
)

// write replaces the part's rows of the table between the marks of the page that name the command. Rows of
// other parts stay, in the order of the parts; those of a part that is no more go.
func (s *sheet) write(path, command string, parts []string) error {
	beginMark := "<!-- figures: written by " + command + " -->"
	raw, err := os.ReadFile(path) //nolint:gosec // the page that the flag names
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(raw), beginMark)
	old, after, ok2 := strings.Cut(rest, endMark)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no marks for the figures", path)
	}
	rows := make(map[string]string)
	for line := range strings.Lines(old) {
		if name, _, found := strings.Cut(strings.TrimPrefix(line, "| "), " | "); found && name != s.part {
			rows[name] += line
		}
	}
	for _, f := range s.all {
		rows[s.part] += f.row()
	}
	table := fmt.Sprintf("%s\n\nMeasured on %d cores, Linux %s, %s.\n\n%s\n%s|\n",
		beginMark, runtime.NumCPU(), kernel(), runtime.Version(), columns, strings.Repeat("| --- ", strings.Count(columns, "|")-1))
	for _, name := range parts {
		table += rows[name]
	}
	return os.WriteFile(path, []byte(before+table+"\n"+endMark+after), 0o644) //nolint:gosec // a page to be read
}

func (f figure) row() string {
	met := "yes"
	if f.target == "" {
		met = ""
	} else if !f.met {
		met = "**no**"
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s |\n", f.part, f.what, f.value, f.target, met, f.on)
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
