//go:build system

package fsops_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
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
	check.Must(t, check.Value(os.FindProcess(os.Getppid()))(t).Kill()) // and this process with it
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
	out := run("^TestRunIsKilled$", killedEnv+"=1")
	check.Require(t, len(rig.Loops(temp)) == 1, "nothing was left: %v\n%s", rig.Loops(temp), out)
	out = run("^$")
	check.That(t, strings.Contains(out, "clearing what an earlier run left"), "it says %s", out)
	check.Empty(t, rig.LoopsLeft(temp), "left")
}

// TestOthersAreNotCleared: a directory is no run's for its name, nor for a stamp that somebody else wrote. The names
// are of no word, because what is cleared is cleared on the whole machine.
func TestOthersAreNotCleared(t *testing.T) {
	temp := t.TempDir()
	const text = "This directory is of one run of crust-proxy's tests. The next run may remove all with its mark: "
	names := []string{"qzxwvk", "q4z7x2", "q4z7x3", "q4z7x4", "q4z7x5"}
	for _, name := range names {
		dir := temp + "/crust-" + name
		check.Must(t, os.Mkdir(dir, 0o755))
		stamp, text := dir+"/.crust-test-run", text+name
		switch name {
		case "qzxwvk", "q4z7x2":
			continue // no stamp
		case "q4z7x3":
			text += "3" // of another
		}
		check.Must(t, os.WriteFile(stamp, []byte(text), 0o600))
		switch name {
		case "q4z7x4":
			check.Must(t, os.Chown(stamp, 1, 1))
		case "q4z7x5":
			check.Must(t, os.Chmod(dir, 0o777))
		}
	}
	image := temp + "/crust-qzxwvk/image"
	check.Must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	device := rig.Loop(t, image, loopdev.Options{})
	cmd := exec.Command("/proc/self/exe", "-test.run", "^$")
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(one string) bool { return strings.HasPrefix(one, "CRUST_TEST_") }), "TMPDIR="+temp)
	out, err := cmd.CombinedOutput()
	check.That(t, err == nil && !strings.Contains(string(out), "clearing"), "%v: %s", err, out)
	for _, name := range names {
		_, err := os.Stat(temp + "/crust-" + name)
		check.That(t, err == nil, "%v", err)
	}
	check.That(t, rig.Loops(image)[device] != "", "its loop device is detached")
}
