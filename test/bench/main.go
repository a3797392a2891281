// Command bench measures crust-proxy against what it must be compared with, side by side in one run, and writes the
// ratios to docs/performance.md. It needs root, and works in a mount namespace of its own.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// The bench starts itself again in these roles.
const (
	roleEmpty  = "empty"
	roleShims  = "shims"
	roleDriver = "driver"
	roleNode   = "node"
	roleFiles  = "files"
)

var roles = map[string]func(args []string) error{
	roleEmpty:  func(args []string) error { return serveEmpty(args[0]) },
	roleShims:  serveShims,
	roleFiles:  holdFiles,
	roleDriver: serveDriver,
	roleNode:   func(args []string) error { return serveNode(args[0], args[1]) },
}

const (
	// page is what the bench writes.
	page = "docs/performance.md"
	// inVMs is the figure with a table of its own: it may be of another machine.
	inVMs = "vm"
	// checked are the parts of --check, slack is how far their ratios may miss their goals in it, and attempts how
	// often a part is measured before it has missed them: the machine may be busy.
	checked  = "lives,stats,guard"
	slack    = 5
	attempts = 3
)

// part is what is measured with a daemon of its own.
type part struct {
	name string
	take func(*testbed)
}

var parts = []part{
	{"lives", lives}, {"start", podStart}, {"stats", statsCalls}, {"pods", pods}, {"kube", kubePods},
	{"scale", scale}, {"quiet", quiet}, {"cluster", inCluster}, {"growth", growth}, {"streams", streams}, {"snapshots", snapshots},
	{"size", size}, {"guard", guard}, {inVMs, vms},
}

func main() {
	if len(os.Args) > 1 {
		if role, ok := roles[os.Args[1]]; ok {
			os.Exit(report(role(os.Args[2:])))
		}
	}
	var s settings
	flag.BoolVar(&s.quick, "quick", false, "a tenth of the rounds; writes no file")
	flag.StringVar(&s.only, "only", "", "these parts alone, such as lives,stats: "+strings.Join(names(), ", ")+", which has a table of its own")
	flag.BoolVar(&s.check, "check", false, "fails where a median misses its goal by far, in a tenth of the rounds of "+checked+"; writes no file")
	flag.Parse()
	if s.check {
		s.quick, s.only = true, cmp.Or(s.only, checked)
	}
	os.Exit(rig.Run(func() int { return report(measure(s)) }, 0))
}

func report(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

type settings struct {
	quick, check bool
	only         string
}

// scale is how many rounds of n are made.
func (s settings) scale(n int) int {
	if s.quick {
		return max(1, n/10)
	}
	return n
}

func names() (all []string) {
	for _, one := range parts {
		all = append(all, one.name)
	}
	return all
}

func (s settings) wanted() ([]part, error) {
	if s.only == "" {
		return slices.DeleteFunc(slices.Clone(parts), func(one part) bool { return one.name == inVMs }), nil
	}
	var all []part
	for name := range strings.SplitSeq(s.only, ",") {
		at := slices.Index(names(), name)
		if at < 0 {
			return nil, fmt.Errorf("--only %s: give some of %s", name, strings.Join(names(), ","))
		}
		all = append(all, parts[at])
	}
	return all, nil
}

// measure measures parts, and writes the rows of each as soon as it has them.
func measure(s settings) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	wanted, err := s.wanted()
	if err != nil {
		return err
	}
	for _, one := range wanted {
		missed, err := s.take(ctx, one)
		for n := 1; s.check && missed && err == nil && n < attempts; n++ {
			missed, err = s.take(ctx, one)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", one.name, err)
		}
		if s.check && missed {
			return fmt.Errorf("%s: a ratio was more than %d times what it may be, %d times in turn", one.name, slack, attempts)
		}
	}
	return nil
}

// take measures a part, and reports whether a figure misses its goal.
func (s settings) take(ctx context.Context, one part) (missed bool, err error) {
	figures := &sheet{part: one.name, slack: 1}
	if s.check {
		figures.slack = slack
	}
	began := time.Now()
	err = rig.Do(ctx, func(t rig.T) { one.take(newTestbed(t, s, figures)) })
	if err == nil && !s.quick {
		err = figures.write(page, one.command(), names())
	}
	fmt.Printf("     %s took %.0f s\n", one.name, time.Since(began).Seconds())
	return slices.ContainsFunc(figures.all, func(f figure) bool { return !f.met }), cmp.Or(err, ctx.Err())
}

// command names the table of a part.
func (p part) command() string {
	if p.name == inVMs {
		return "make bench-vm"
	}
	return "make bench"
}
