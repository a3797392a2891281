//go:build system

package main

import (
	"bufio"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// demo prepares a demonstration, which is a program with namespaces of its own.
func demo(t *testing.T, program string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+filepath.Dir(program), "NO_COLOR=1")
	return cmd
}

func build(t *testing.T) string {
	t.Helper()
	program := t.TempDir() + "/demo"
	check.Must(t, rig.BuildStatic(program, "test/demo"))
	return program
}

// TestPods runs `make demo-pod`, whose every line is a check.
func TestPods(t *testing.T) {
	out, err := demo(t, build(t), "pod").CombinedOutput()
	said := string(out)
	check.That(t, err == nil && strings.Contains(said, "Everything shown was checked") && !strings.Contains(said, "✗"), "%v\n%s", err, said)
}

// TestKilledHalfWay: what a killed demonstration leaves, the next one clears, and runs.
func TestKilledHalfWay(t *testing.T) {
	program := build(t)
	first := demo(t, program)
	out := check.Value(first.StdoutPipe())(t)
	check.Must(t, first.Start())
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "A second pod wants the same disk") {
	}
	check.Must(t, first.Process.Kill())
	_, _ = io.Copy(io.Discard, out) // until all of its processes that would write have ended
	_ = first.Wait()
	left := check.Value(filepath.Glob(filepath.Dir(program) + "/crust-*"))(t)
	check.Require(t, len(left) == 1, "directories of the killed demonstration: %q", left)
	mark := strings.TrimPrefix(filepath.Base(left[0]), "crust-")
	check.Require(t, len(rig.Loops(mark)) != 0, "it was not killed half-way: no loop device is left")
	said, err := demo(t, program).CombinedOutput()
	check.That(t, err == nil && strings.Contains(string(said), "clearing what an earlier run left"), "%v\n%s", err, said)
	processes := rig.Processes(func(proc string) bool {
		env, _ := os.ReadFile(proc + "/environ") //nolint:gosec // a file of the kernel's
		return strings.Contains(string(env), "CRUST_TEST_NAMESPACE="+mark)
	})
	directories, _ := filepath.Glob("/tmp/*" + mark + "*")
	loops := rig.LoopsLeft(mark)
	check.That(t, len(loops)+len(processes)+len(directories) == 0, "still there: %q, processes %v, %q", loops, processes, directories)
}

// TestAsksFirst: on a machine that lacks something, all that is missing is said in plain lines with
// a remedy, and nothing is downloaded, installed or built.
func TestAsksFirst(t *testing.T) {
	for name, c := range map[string]struct {
		programs map[string]string // stand-ins in the PATH, by name
		env      []string
		says     []string
	}{
		"not root":                {map[string]string{"id": "echo 1000"}, nil, []string{"This is not root", "sudo -E make demo"}},
		"no namespace":            {map[string]string{"unshare": "exit 1"}, nil, []string{"unshare -m", "--privileged"}},
		"no loop device":          {map[string]string{"losetup": "exit 1"}, nil, []string{"No loop device", "modprobe loop"}},
		"nothing":                 {map[string]string{"losetup": "exit 1", "unshare": "exit 1"}, nil, []string{"unshare -m", "No loop device"}},
		"no Go":                   {nil, []string{"GO=no-such-go"}, []string{"Go is missing", "https://go.dev/dl/"}},
		"an old Go":               {map[string]string{"go": `echo go version go1.19.8 linux/amd64`}, nil, []string{"Go 1.19.8 is too old"}},
		"a Go that fetches none":  {map[string]string{"go": `[ "$1" = env ] && echo local || echo go version go1.24.0 linux/amd64`}, nil, []string{"Go 1.24.0 is too old"}},
		"no module, certificates": {map[string]string{"go": `[ "$1" = list ] && exit 1; echo go version go1.99.0 linux/amd64`}, []string{"CRUST_CERTIFICATES=/does/not/exist"}, []string{"no CA certificates", "apt-get install -y ca-certificates"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			programs := map[string]string{"apt-get": "touch " + dir + "/installed"}
			maps.Copy(programs, c.programs)
			for program, script := range programs {
				check.Must(t, os.WriteFile(dir+"/"+program, []byte("#!/bin/sh\n"+script+"\n"), 0o755)) //nolint:gosec // a program
			}
			cmd := exec.CommandContext(t.Context(), "../../hack/demo.sh")
			cmd.Env = append(append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH")), c.env...)
			raw, err := cmd.CombinedOutput()
			out := string(raw)
			check.Says(t, "it", out, c.says...)
			_, installed := os.Stat(dir + "/installed")
			check.That(t, err != nil && installed != nil && !strings.Contains(out, "Building") && strings.Count(out, "\n") <= 5,
				"%v, installed: %v\n%s", err, installed == nil, out)
		})
	}
}
