package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// The colours; empty where nobody would see them.
var bold, dim, green, red, plain = colours()

func colours() (bold, dim, green, red, plain string) {
	info, err := os.Stdout.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 || os.Getenv("NO_COLOR") != "" {
		return "", "", "", "", ""
	}
	return "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[31m", "\x1b[0m"
}

// teller tells the story and remembers what was not true.
type teller struct {
	step   int
	failed int
}

// tell has the acts of a story played.
func (t *teller) tell(stage rig.T, acts ...func(context.Context)) {
	for _, act := range acts {
		act(stage.Context())
		check.Must(stage, stage.Context().Err())
	}
	if t.failed > 0 {
		stage.Errorf("%d checks failed", t.failed)
	}
}

// begin names the next step.
func (t *teller) begin(format string, args ...any) {
	t.step++
	fmt.Printf("\n%s%2d  %s%s\n", bold, t.step, fmt.Sprintf(format, args...), plain)
}

// check says something, and whether it is true.
func (t *teller) check(is bool, format string, args ...any) {
	mark := green + "✓" + plain
	if !is {
		mark = red + "✗" + plain
		t.failed++
	}
	fmt.Printf("    %s %s\n", mark, fmt.Sprintf(format, args...))
}

// quote shows what was seen.
func (t *teller) quote(text string) {
	for line := range strings.SplitSeq(strings.TrimRight(text, "\n"), "\n") {
		fmt.Printf("      %s%s%s\n", dim, line, plain)
	}
}
