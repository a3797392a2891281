package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
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

// teller tells the story of a volume and remembers what was not true.
type teller struct {
	t      rig.T
	v      *csivolume.Volume
	disk   string // of the volume, once it is published
	step   int
	failed int
}

// tell has the acts of the story played.
func (t *teller) tell(acts ...func(context.Context)) {
	for _, act := range acts {
		act(t.t.Context())
		t.must(t.t.Context().Err())
	}
	check.That(t.t, t.failed == 0, "%d checks failed", t.failed)
}

func (t *teller) must(err error) { t.t.Helper(); check.Must(t.t, err) }

// part is something that the demonstration shows, and whether it is what a node has.
type part struct{ is, what string }

const (
	isReal   = "real"
	emulated = "emulated"
)

func (t *teller) cast(parts ...part) {
	fmt.Printf("%sWhat plays which part%s\n", bold, plain)
	for _, p := range parts {
		fmt.Printf("    %-9s %s\n", p.is, p.what)
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

// wantRefused has a second pod ask for the disk.
func (t *teller) wantRefused(second string) error {
	refusal := t.v.As(second).TryPublish()
	t.check(status.Code(refusal) == codes.FailedPrecondition, "it is refused: %v", status.Code(refusal))
	return refusal
}

// fsck looks whether the filesystem is whole.
func (t *teller) fsck(ctx context.Context) {
	out, err := exec.CommandContext(ctx, "fsck.ext4", "-fn", t.disk).CombinedOutput() //nolint:gosec // our own device
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	t.check(err == nil, "fsck finds nothing: %s", lines[len(lines)-1])
}
