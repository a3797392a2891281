package runc

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// A runtime that says all that it was given.
const tellingRuntime = `#!/bin/sh
echo "pid $$"
for word; do printf 'word <%s>\n' "$word"; done
env | grep -v '^_=\|^PWD=\|^SHLVL=\|^OLDPWD=' | sort
pwd
umask
cat
[ -e /proc/self/fd/3 ] && cat <&3
echo /proc/$$/fd/*
echo complaint >&2
[ -n "$DIE" ] && kill -TERM $$
exit 77
`

// become runs crust-runc over the telling runtime.
type became struct {
	cmd         *exec.Cmd
	out, stderr bytes.Buffer
}

func buildRunc(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "crust-runc")
	out, err := exec.Command("go", "build", "-o", program, "github.com/crust-proxy/crust-proxy/cmd/crust-runc").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

func newBecame(t *testing.T, program string, env []string, args ...string) *became {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/runtime", []byte(tellingRuntime), 0o700)) //nolint:gosec // a program
	raw, err := json.Marshal(map[string]string{"runtime": dir + "/runtime", "root": dir + "/crust"})
	check.Must(t, err)
	check.Must(t, os.WriteFile(dir+"/c.json", raw, 0o600))
	b := &became{cmd: exec.Command(program, args...)}
	b.cmd.Dir = dir
	b.cmd.Env = append([]string{configVariable + "=" + dir + "/c.json", "PATH=" + os.Getenv("PATH")}, env...)
	b.cmd.Stdin = strings.NewReader("input\n")
	b.cmd.Stdout, b.cmd.Stderr = &b.out, &b.stderr
	extra, err := os.CreateTemp(dir, "extra")
	check.Must(t, err)
	t.Cleanup(func() { _ = extra.Close() })
	_, err = extra.WriteString("a third descriptor\n")
	check.Must(t, err)
	_, err = extra.Seek(0, 0)
	check.Must(t, err)
	b.cmd.ExtraFiles = []*os.File{extra}
	return b
}

func (b *became) status(t *testing.T) syscall.WaitStatus {
	t.Helper()
	var exit *exec.ExitError
	if err := b.cmd.Run(); !errors.As(err, &exit) {
		t.Fatalf("it ended with: %v\n%s", err, &b.stderr)
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	if !ok {
		t.Fatalf("its end cannot be read: %v", exit)
	}
	return status
}

// TestBecomesRunc: whatever it is asked for, runc is the same process with the
// same words, environment, descriptors and end.
func TestBecomesRunc(t *testing.T) {
	program := buildRunc(t)
	for _, args := range [][]string{
		{"--root", "/r", "exec", "--tty", "id", "", "two words", "--bundle=/x", "-", "ünï\ncode", "$(reboot)"},
		{"create", "--bundle", "/does/not/exist", "id"},
		{"--log", "/dev/null", "start", "id"},
		{"unheard-of", "--of"},
		{"--version"},
		{},
	} {
		b := newBecame(t, program, []string{"A=1", "NOTIFY_SOCKET=/n", "EMPTY="}, args...)
		if status := b.status(t); status.ExitStatus() != 77 {
			t.Errorf("%q: ended with %v", args, status)
		}
		// The same runtime, started without us in the same surroundings.
		direct := newBecame(t, filepath.Join(b.cmd.Dir, "runtime"), []string{"A=1", "NOTIFY_SOCKET=/n", "EMPTY="}, args...)
		direct.cmd.Dir, direct.cmd.Env = b.cmd.Dir, b.cmd.Env
		direct.status(t)
		want := strings.ReplaceAll(direct.out.String(), strconv.Itoa(direct.cmd.Process.Pid), strconv.Itoa(b.cmd.Process.Pid))
		if diff := cmp.Diff(want, b.out.String()); diff != "" || b.stderr.String() != direct.stderr.String() {
			t.Errorf("%q: %s\n%s", args, diff, &b.stderr)
		}
		for _, given := range append(args, "A=1", "EMPTY=", "input", "a third descriptor") {
			if !strings.Contains(want, given) {
				t.Errorf("%q: the runtime was not given %q", args, given)
			}
		}
	}
}

func TestEndsBySignalAsRuncDoes(t *testing.T) {
	b := newBecame(t, buildRunc(t), []string{"DIE=1"}, "run", "id")
	if status := b.status(t); !status.Signaled() || status.Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v", status)
	}
}

// What cannot be done is told where containerd looks for it, and where people do.
func TestFailureIsToldInTheLog(t *testing.T) {
	program := buildRunc(t)
	b := newBecame(t, program, nil, "--log", "log.json", "--log-format", "json", "create", "--bundle", ".", "id")
	check.Must(t, os.WriteFile(b.cmd.Dir+"/c.json", []byte(`{"runtime":"/does/not/exist"}`), 0o600))
	if status := b.status(t); status.ExitStatus() != 1 {
		t.Errorf("it ended with %v", status)
	}
	raw, err := os.ReadFile(b.cmd.Dir + "/log.json")
	check.Must(t, err)
	var line struct{ Level, Msg, Time string }
	if err := json.Unmarshal(raw, &line); err != nil || line.Level != "error" || !strings.Contains(line.Msg, "/does/not/exist") || line.Time == "" {
		t.Errorf("%v: %s", err, raw)
	}
	if !strings.Contains(b.stderr.String(), line.Msg) {
		t.Errorf("told: %s", &b.stderr)
	}
}

// TestFeaturesHaveALinuxSection: containerd 2.4.1 crashes over features without one. Where
// crust-runc cannot become runc it prints none at all.
func TestFeaturesHaveALinuxSection(t *testing.T) {
	runc, err := exec.LookPath("runc")
	if err != nil {
		rig.Missing(t, "runc is not installed")
	}
	program := buildRunc(t)
	config := filepath.Join(t.TempDir(), "c.json")
	features := func(text string) ([]byte, error) {
		check.Must(t, os.WriteFile(config, []byte(text), 0o600))
		cmd := exec.Command(program, "features")
		cmd.Env = append(os.Environ(), configVariable+"="+config)
		return cmd.Output()
	}
	got, err := features(`{"runtime":"` + runc + `"}`)
	check.Must(t, err)
	want, err := exec.Command(runc, "features").Output()
	check.Must(t, err)
	var has struct {
		Linux *struct{ Namespaces []string }
	}
	check.Must(t, json.Unmarshal(got, &has))
	if has.Linux == nil || len(has.Linux.Namespaces) == 0 || !bytes.Equal(got, want) {
		t.Errorf("it says %s, and runc %s", got, want)
	}
	for _, bad := range []string{"{", `{"runtime":"/nonexistent"}`} {
		if got, err := features(bad); err == nil || len(got) > 0 {
			t.Errorf("with the configuration %s it says %q, %v", bad, got, err)
		}
	}
}
