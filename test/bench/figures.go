package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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

// durations is a sample.
type durations []time.Duration

func (d durations) at(quantile float64) time.Duration {
	slices.Sort(d)
	return d[min(len(d)-1, int(float64(len(d))*quantile))]
}

func (d durations) median() time.Duration { return d.at(0.5) }

// timed measures f n times.
func timed(n int, f func() error) (durations, error) {
	out := make(durations, 0, n)
	for range n {
		start := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		out = append(out, time.Since(start))
	}
	return out, nil
}

// rate tells how many calls a second the callers make together.
func rate(callers int, during time.Duration, f func(caller int) error) (float64, error) {
	var done atomic.Int64
	var failed atomic.Pointer[error]
	var working sync.WaitGroup
	deadline := time.Now().Add(during)
	start := time.Now()
	for caller := range callers {
		working.Go(func() {
			for time.Now().Before(deadline) && failed.Load() == nil {
				if err := f(caller); err != nil {
					failed.Store(&err)
					return
				}
				done.Add(1)
			}
		})
	}
	working.Wait()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return float64(done.Load()) / time.Since(start).Seconds(), nil
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

const (
	beginMark = "<!-- figures: written by make bench -->"
	endMark   = "<!-- end of figures -->"
)

// write puts the table between the marks of the page.
func (s *sheet) write(path string) error {
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
