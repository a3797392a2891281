package failpoint_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func build(t *testing.T, tags string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "hit")
	check.Run(t, exec.CommandContext(t.Context(), "go", "build", "-tags", tags, "-o", program, "./testdata/hit"))
	return program
}

func TestReleaseBuildHasNoneOfIt(t *testing.T) {
	// The names are cut so that this file could never be what is found.
	traces := []string{"CRUST_" + "FAILPOINTS", "a-place-" + "in-the-program", "failpoint" + ".Hit", "failpoint" + ".init"}
	inside := func(program string) (found []string) {
		content := check.Value(os.ReadFile(program))(t) //nolint:gosec // built by this test
		for _, trace := range traces {
			if bytes.Contains(content, []byte(trace)) {
				found = append(found, trace)
			}
		}
		return found
	}
	check.Empty(t, inside(build(t, "")), "a release build contains")
	found := inside(build(t, "failpoints"))
	check.That(t, len(found) >= 3, "the check is blind: a build with failpoints shows only %q", found)
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
		exit, is := errors.AsType[*exec.ExitError](err)
		return is && exit.String() == "signal: killed"
	}
	out, _, err := runIt("elsewhere=kill")
	check.That(t, err == nil && out == "first\nsecond\n", "untouched: %q, %v", out, err)
	out, _, err = runIt("a-place-in-the-program=kill")
	check.That(t, killed(err) && out == "", "kill: %q, %v", out, err)
	out, _, err = runIt("elsewhere=kill, a-place-in-the-program@2=kill")
	check.That(t, killed(err) && out == "first\n", "kill at the second hit: %q, %v", out, err)
	_, took, err := runIt("a-place-in-the-program@1=sleep:150ms")
	check.That(t, err == nil && took >= 150*time.Millisecond, "sleep: took %v, %v", took, err)
	for _, wrong := range []string{"x", "x=", "x=error", "x@0=kill", "x@a=kill", "x=sleep:soon"} {
		var exit *exec.ExitError
		_, _, err := runIt(wrong)
		check.That(t, errors.As(err, &exit) && exit.ExitCode() == 2 && strings.Contains(string(exit.Stderr), "CRUST_FAILPOINTS"),
			"%q is taken: %v", wrong, err)
	}
}
