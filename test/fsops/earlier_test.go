//go:build system

package fsops_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// killedEnv has this binary be a run of tests that is killed.
const killedEnv = "CRUST_TEST_KILLED"

// TestRunIsKilled is run by the test below.
func TestRunIsKilled(t *testing.T) {
	if os.Getenv(killedEnv) == "" {
		t.Log("run by TestEarlierRunIsCleared only")
		return
	}
	r := newFreezeRig(t, "ext4")
	r.forgotten(10 * time.Minute)
	parent, err := os.FindProcess(os.Getppid())
	check.Must(t, err)
	check.Must(t, parent.Kill()) // and this process with it
	time.Sleep(time.Minute)
}

// TestEarlierRunIsCleared: a run that was killed leaves a frozen filesystem; the next one removes it.
func TestEarlierRunIsCleared(t *testing.T) {
	temp := t.TempDir()
	run := func(test string, more ...string) string {
		cmd := exec.Command("/proc/self/exe", "-test.v", "-test.run", test)
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(one string) bool { return strings.HasPrefix(one, "CRUST_TEST_") }),
			append(more, "TMPDIR="+temp)...)
		out, _ := cmd.CombinedOutput() // it is killed, or says so in words
		return string(out)
	}
	if out := run("^TestRunIsKilled$", killedEnv+"=1"); len(rig.Loops(temp)) != 1 {
		t.Fatalf("nothing was left: %v\n%s", rig.Loops(temp), out)
	}
	if out := run("^$"); !strings.Contains(out, "clearing what an earlier run left") {
		t.Errorf("it says %s", out)
	}
	if left := rig.LoopsLeft(temp); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
