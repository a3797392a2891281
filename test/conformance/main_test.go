//go:build system

package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

// bench is a node on which a handler is tried.
type bench struct {
	t       *testing.T
	dir     string
	root    string // of the volumes' directories
	handler string // the program that is tried
	agent   bool   // crust-runc offers its socket, too
	runtime string // crust-runc's own, or "" for runc
	limit   time.Duration
	runs    []string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	rig.Need(t, "runc")
	// Short, because sockets lie below it, and not on a tmpfs, because disks do.
	dir := check.Value(os.MkdirTemp("/var/tmp", rig.Prefix("cf")))(t)
	t.Cleanup(func() { check.Must(t, os.RemoveAll(dir)) })
	return &bench{t: t, dir: dir, root: dir + "/crust", limit: 4 * time.Minute}
}

// crustRunc has crust-runc be tried, started by a shell script that does something
// else before: $REAL is crust-runc, and $ROOT where volumes are.
func (b *bench) crustRunc(before string) *bench {
	b.t.Helper()
	actual := rig.Program(b.t, "crust-runc")
	rig.Program(b.t, "crust-runc-agent")
	b.handler = b.dir + "/handler"
	config := fmt.Sprintf(`{"root":%q,"stateDir":%q,"program":%q,"agent":%t,"agentProgram":%q,"runtime":%q}`,
		b.root, b.dir+"/state", b.handler, b.agent, filepath.Dir(actual)+"/crust-runc-agent", b.runtime)
	check.Must(b.t, os.WriteFile(b.dir+"/config.json", []byte(config), 0o600))
	script := fmt.Sprintf("#!/bin/sh\nexport CRUST_RUNC_CONFIG=%s/config.json\nROOT=%s REAL=%s\n%s\nexec $REAL \"$@\"\n", b.dir, b.root, actual, before)
	check.Must(b.t, os.WriteFile(b.handler, []byte(script), 0o755))
	return b
}

// example has the handler of examples be tried.
func (b *bench) example() *bench {
	b.t.Helper()
	b.handler = b.dir + "/handler"
	check.Must(b.t, rig.BuildStatic(b.dir+"/example", "examples/runtime-handler"))
	config := fmt.Sprintf(`{"root":%q,"program":%q}`, b.root, b.handler)
	check.Must(b.t, os.WriteFile(b.dir+"/config.json", []byte(config), 0o600))
	script := fmt.Sprintf("#!/bin/sh\nRUNTIME_HANDLER_CONFIG=%[1]s/config.json exec %[1]s/example \"$@\"\n", b.dir)
	check.Must(b.t, os.WriteFile(b.handler, []byte(script), 0o755))
	return b
}

// crustVM has crust-vm be tried.
func (b *bench) crustVM() *bench {
	b.t.Helper()
	rig.Need(b.t, "qemu-system-x86_64")
	actual := rig.Program(b.t, "crust-vm")
	rig.Program(b.t, "crust-vm-agent")
	b.handler, b.limit = b.dir+"/handler", 20*time.Minute // where machines are emulated
	raw := check.Value(json.Marshal(map[string]any{
		"kernel": vmnode.Kernel(b.t), "root": b.root, "stateDir": b.dir + "/state", "program": b.handler,
		"agentProgram": filepath.Dir(actual) + "/crust-vm-agent", "bootTimeoutSeconds": 110, "memoryMiB": 320,
	}))(b.t)
	check.Must(b.t, os.WriteFile(b.dir+"/config.json", raw, 0o600))
	script := fmt.Sprintf("#!/bin/sh\nexport CRUST_VM_CONFIG=%s/config.json\nexec %s \"$@\"\n", b.dir, actual)
	check.Must(b.t, os.WriteFile(b.handler, []byte(script), 0o755))
	return b
}

// command runs crust-conformance.
func (b *bench) command(fs string, args ...string) *exec.Cmd {
	b.t.Helper()
	rig.Need(b.t, "mkfs."+fs)
	args = append([]string{"-o", "json", "--runtime", b.handler, "--root", b.root, "--dir", b.dir, "--fs", fs}, args...)
	return exec.Command(rig.Program(b.t, "crust-conformance"), args...)
}

// waitBegun waits until a run has made its directory: before that no signal finds anything to be removed.
func (b *bench) waitBegun() {
	b.t.Helper()
	check.Eventually(b.t, "the run has begun", func() bool {
		found := check.Value(filepath.Glob(b.dir + "/crust-conformance-*"))(b.t)
		return len(found) > 0
	})
}

type outcome struct {
	code   int
	stderr string
	report conformance.Report
}

func (b *bench) run(fs string, args ...string) outcome {
	b.t.Helper()
	template := b.command(fs, args...)
	cmd := exec.CommandContext(check.Within(b.t, b.limit), template.Path, template.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	var out, told bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &told
	err := cmd.Run()
	check.Require(b.t, err == nil || errors.As(err, new(*exec.ExitError)), "%v", err)
	o := outcome{code: cmd.ProcessState.ExitCode(), stderr: told.String()}
	err = json.Unmarshal(out.Bytes(), &o.report)
	check.Require(b.t, err == nil, "the report: %v\n%s\n%s", err, out.String(), told.String())
	b.runs = append(b.runs, o.report.Run)
	b.wantClean()
	return o
}

// of lists the demands with a status.
func (o outcome) of(status conformance.Status) []string {
	var names []string
	for _, r := range o.report.Results {
		if r.Status == status {
			names = append(names, r.Name)
		}
	}
	return names
}

func (o outcome) wantFailed(t *testing.T, names ...string) {
	t.Helper()
	if got := o.of(conformance.Fail); !slices.Equal(got, names) {
		t.Errorf("failed: %q, want %q", got, names)
		for _, r := range o.report.Results {
			if r.Status == conformance.Fail {
				t.Logf("%s: %s", r.Name, r.Seen)
			}
		}
	}
	code := min(len(names), 1)
	check.That(t, o.code == code, "exit code %d, want %d: %s", o.code, code, o.stderr)
}

// wantClean fails where anything of a run is left.
func (b *bench) wantClean() {
	b.t.Helper()
	patterns := []string{b.dir + "/crust-conformance-*", b.dir + "/crust/*", b.dir + "/crust/.[^.]*"}
	for _, run := range b.runs {
		patterns = append(patterns, "/sys/fs/cgroup/conformance-"+run+"-*", "/sys/fs/cgroup/*/conformance-"+run+"-*")
	}
	for _, pattern := range patterns {
		check.Empty(b.t, check.Value(filepath.Glob(pattern))(b.t), "left behind")
	}
	check.Empty(b.t, rig.MountPoints(b.dir), "left mounted")
	// The kernel lets go of loop devices, and containers end, a moment later.
	check.Empty(b.t, check.Left(30*time.Second, 100*time.Millisecond, func() []string { return append(b.disks(), b.processes()...) }), "left behind")
}

func (b *bench) disks() []string { return slices.Collect(maps.Values(rig.Loops(b.dir + "/"))) }

// processes are those that write into a file of ours: all of the containers do.
func (b *bench) processes() []string {
	var left []string
	outputs, _ := filepath.Glob("/proc/[0-9]*/fd/1")
	for _, output := range outputs {
		if path, err := os.Readlink(output); err == nil && strings.HasPrefix(path, b.dir+"/") {
			left = append(left, output)
		}
	}
	return left
}
