package failpoint_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func build(t *testing.T, tags string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "hit")
	//nolint:gosec // the arguments are this test's own
	out, err := exec.CommandContext(t.Context(), "go", "build", "-tags", tags, "-o", program, "./testdata/hit").CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return program
}

func TestReleaseBuildHasNoneOfIt(t *testing.T) {
	// The names are cut so that this file could never be what is found.
	traces := []string{"CRUST_" + "FAILPOINTS", "a-place-" + "in-the-program", "failpoint" + ".Hit", "failpoint" + ".init"}
	inside := func(program string) (found []string) {
		content, err := os.ReadFile(program) //nolint:gosec // built by this test
		if err != nil {
			t.Fatal(err)
		}
		for _, trace := range traces {
			if bytes.Contains(content, []byte(trace)) {
				found = append(found, trace)
			}
		}
		return found
	}
	if found := inside(build(t, "")); len(found) > 0 {
		t.Errorf("a release build contains %q", found)
	}
	if found := inside(build(t, "failpoints")); len(found) < 3 {
		t.Errorf("the check is blind: a build with failpoints shows only %q", found)
	}
}

func TestFailpoints(t *testing.T) {
	program := build(t, "failpoints")
	runIt := func(points string) (string, time.Duration, error) {
		cmd := exec.CommandContext(t.Context(), program) //nolint:gosec // built by this test
		cmd.Env = append(os.Environ(), "CRUST_FAILPOINTS="+points)
		began := time.Now()
		out, err := cmd.Output()
		return string(out), time.Since(began), err
	}
	killed := func(err error) bool {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			return false
		}
		status, ok := exit.Sys().(syscall.WaitStatus)
		return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
	}
	if out, _, err := runIt("elsewhere=kill"); err != nil || out != "first\nsecond\n" {
		t.Errorf("untouched: %q, %v", out, err)
	}
	if out, _, err := runIt("a-place-in-the-program=kill"); !killed(err) || out != "" {
		t.Errorf("kill: %q, %v", out, err)
	}
	if out, _, err := runIt("elsewhere=kill, a-place-in-the-program@2=kill"); !killed(err) || out != "first\n" {
		t.Errorf("kill at the second hit: %q, %v", out, err)
	}
	if _, took, err := runIt("a-place-in-the-program@1=sleep:150ms"); err != nil || took < 150*time.Millisecond {
		t.Errorf("sleep: took %v, %v", took, err)
	}
	for _, wrong := range []string{"x", "x=", "x=error", "x@0=kill", "x@a=kill", "x=sleep:soon"} {
		var exit *exec.ExitError
		if _, _, err := runIt(wrong); !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(exit.Stderr), "CRUST_FAILPOINTS") {
			t.Errorf("%q is taken: %v", wrong, err)
		}
	}
}
