package crust

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
)

// askedBy has a volume whose sandbox is asked by a program of this script.
func askedBy(t *testing.T, script string) (*bench, *volume.Volume) {
	t.Helper()
	b := newBench(t, byProgram)
	b.program(t, "runtime", script)
	v := published(t, b, "a")
	b.startSandbox(t, v, "sb1")
	return b, v
}

func TestAnswersOfPrograms(t *testing.T) {
	const flood = "while echo 0123456789012345678901234567890123456789012345678901234567890123456789; do :; done"
	for name, c := range map[string]struct {
		script string
		kind   volume.Kind
		text   string
	}{
		"refusal":            {"echo no such luck >&2; echo more >&2; exit 1", volume.Refused, "no such luck"},
		"another code":       {"exit 77", volume.Refused, "no reason"},
		"unknown word":       {"exit 2", volume.Unsupported, "stats"},
		"unsupported":        {"echo not this filesystem >&2; exit 4", volume.Unsupported, "not this filesystem"},
		"out of range":       {"echo too small >&2; exit 5", volume.OutOfRange, "too small"},
		"wrong state":        {"echo prog: volume $3: sandbox sb1: not frozen >&2; exit 6", volume.InUse, "sb1 refused stats: prog: not frozen"},
		"killed":             {"kill -9 $$", volume.Refused, "signal killed"},
		"nothing":            {"exit 0", volume.Malformed, "cannot be read"},
		"empty":              {"echo {}", volume.Malformed, "neither"},
		"two answers":        {`echo '{"usage":[]}{}'`, volume.Malformed, "cannot be read"},
		"not JSON":           {`printf '\033[2J<html>'`, volume.Malformed, "cannot be read"},
		"flood":              {flood, volume.Exhausted, "65536"},
		"flooding complaint": {"(" + flood + ") >&2; exit 1", volume.Refused, "0123456789"},
		"hidden escape":      {`printf '\033]0;owned\007' >&2; exit 1`, volume.Refused, "?]0;owned?"},
		"negative":           {`echo '{"usage":[{"total":10,"used":-1,"unit":"BYTES"}]}'`, volume.Absurd, "-1"},
		"more used than all": {`echo '{"usage":[{"total":10,"used":11,"unit":"BYTES"}]}'`, volume.Absurd, "11"},
		"more free than all": {`echo '{"usage":[{"total":10,"available":11,"unit":"BYTES"}]}'`, volume.Absurd, "11"},
		"beyond the device":  {`echo '{"usage":[{"total":4097,"used":1,"unit":"BYTES"}]}'`, volume.Absurd, "4096"},
		"a number too large": {`echo '{"usage":[{"total":9223372036854775808,"unit":"BYTES"}]}'`, volume.Malformed, "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			b, v := askedBy(t, c.script)
			b.sized(t, v, 4096)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := b.h.Stats(ctx, v)
			handlers.WantError(t, err, c.kind, v, "sb1", c.text)
		})
	}
}

func TestLyingResize(t *testing.T) {
	for answer, text := range map[string]string{
		`{"capacity_bytes":1023}`: "1023", `{"capacity_bytes":4097}`: "4097", `{"capacity_bytes":-1}`: "-1", `{}`: "0 bytes",
		`{"capacity_bytes":3000}`: "3000",
	} {
		b, v := askedBy(t, "echo '"+answer+"'")
		b.sized(t, v, 2048)
		_, err := b.h.Resize(t.Context(), v, volume.Range{Required: 1024, Limit: 4096})
		handlers.WantError(t, err, volume.Absurd, v, "sb1", text)
	}
	b, v := askedBy(t, `echo '{"capacityBytes":"'$4'"}'`)
	for _, r := range []volume.Range{{Required: -1}, {Limit: -1}, {Required: 2, Limit: 1}} {
		_, err := b.h.Resize(t.Context(), v, r)
		handlers.WantError(t, err, volume.Invalid, v)
	}
	if size, err := b.h.Resize(t.Context(), v, volume.Range{Required: 5}); err != nil || size != 5 {
		t.Errorf("%d, %v", size, err)
	}
}

// TestProgramsSurroundings has the program tell what it was given.
func TestProgramsSurroundings(t *testing.T) {
	t.Setenv("SECRET_OF_OURS", "1")
	out := filepath.Join(handlers.ShortDir(t), "out")
	b, v := askedBy(t, `{ echo "$@"; env; pwd; cat; ls -l /proc/self/fd; } > `+out+` 2>&1; echo '{}'`)
	check.Must(t, b.h.Freeze(t.Context(), v, 3*time.Second+time.Millisecond))
	raw, err := os.ReadFile(out)
	check.Must(t, err)
	said := string(raw)
	if !strings.HasPrefix(said, "crust freeze "+v.ResolvedTarget+" 3\n") {
		t.Errorf("arguments: %s", said)
	}
	for _, bad := range []string{"SECRET_OF_OURS", "HOME=", "socket:", "inotify"} {
		if strings.Contains(said, bad) {
			t.Errorf("it was given %s:\n%s", bad, said)
		}
	}
	for _, want := range []string{"LC_ALL=C", "PATH=/usr/sbin:", "\n/\n", "-> /dev/null"} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is missing:\n%s", want, said)
		}
	}
}

// A program that hangs goes at the deadline, and all its children with it.
func TestHungProgramIsKilledWithItsChildren(t *testing.T) {
	pids := filepath.Join(handlers.ShortDir(t), "pids")
	b, v := askedBy(t, `sleep 1000 & echo $! > `+pids+`; echo $$ >> `+pids+`; trap "" TERM INT HUP; wait; sleep 1000`)
	var found []string
	for allowed := 300 * time.Millisecond; len(found) < 2; allowed *= 2 { // until it has come to hang
		ctx, cancel := context.WithTimeout(t.Context(), allowed)
		begin := time.Now()
		_, err := b.h.Stats(ctx, v)
		cancel()
		handlers.WantError(t, err, volume.Timeout, v, "sb1", "in time")
		if took := time.Since(begin); took > allowed+20*time.Second { // and not the 1000 of the program
			t.Fatalf("it took %v", took)
		}
		raw, _ := os.ReadFile(pids)
		found = strings.Fields(string(raw))
	}
	for _, text := range found {
		pid, err := strconv.Atoi(text)
		check.Must(t, err)
		check.Eventually(t, "process "+text+" is gone", func() bool { return !alive(pid) })
	}
}

// alive tells a process from a zombie that nobody waits for.
func alive(pid int) bool {
	raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(raw), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// A child that holds the output open does not hold up the answer.
func TestChildThatStaysBehind(t *testing.T) {
	b, v := askedBy(t, `sleep 30 & echo '{"usage":[{"total":10,"unit":"BYTES"}]}'`)
	begin := time.Now()
	if _, err := b.h.Stats(t.Context(), v); err != nil || time.Since(begin) > 20*time.Second {
		t.Errorf("after %v: %v", time.Since(begin), err)
	}
}

func TestProgramsThatAreNotRun(t *testing.T) {
	ran := filepath.Join(handlers.ShortDir(t), "ran")
	for name, c := range map[string]struct {
		spoil func(t *testing.T, path string)
		kind  volume.Kind
		text  string
	}{
		"writable by all":   {func(t *testing.T, p string) { check.Must(t, os.Chmod(p, 0o757)) }, volume.Denied, "chmod go-w"},
		"writable by group": {func(t *testing.T, p string) { check.Must(t, os.Chmod(p, 0o775)) }, volume.Denied, "chmod go-w"},
		"not executable":    {func(t *testing.T, p string) { check.Must(t, os.Chmod(p, 0o644)) }, volume.Denied, "not executable"},
		"a link": {func(t *testing.T, p string) {
			check.Must(t, os.Rename(p, p+".real"))
			check.Must(t, os.Symlink(p+".real", p))
		}, volume.Denied, "symbolic link"},
		"a directory": {func(t *testing.T, p string) {
			check.Must(t, os.Remove(p))
			check.Must(t, os.Mkdir(p, 0o755))
		}, volume.Denied, "regular file"},
		"a pipe": {func(t *testing.T, p string) {
			check.Must(t, os.Remove(p))
			check.Must(t, unix.Mkfifo(p, 0o755))
		}, volume.Denied, "regular file"},
		"missing": {func(t *testing.T, p string) { check.Must(t, os.Remove(p)) }, volume.Unsupported, "not installed"},
	} {
		t.Run(name, func(t *testing.T) {
			b, v := askedBy(t, "touch "+ran)
			c.spoil(t, b.cfg.Programs[0])
			_, err := b.h.Stats(t.Context(), v)
			handlers.WantError(t, err, c.kind, v, "sb1", c.text)
			if err := b.h.Health(t.Context()); volume.KindOf(err) != c.kind {
				t.Errorf("Health: %v", err)
			}
		})
	}
	b, v := askedBy(t, "touch "+ran)
	b.h.cfg.Owner = uint32(os.Getuid()) + 1
	_, err := b.h.Stats(t.Context(), v)
	handlers.WantError(t, err, volume.Denied, v, "sb1", "chown")
	b.h.cfg.Owner = b.cfg.Owner
	b.leave(t, v, "sb1", b.program(t, "another", "touch "+ran), "")
	_, err = b.h.Stats(t.Context(), v)
	handlers.WantError(t, err, volume.Denied, v, "sb1", "another", "handlers.crust.programs")
	if _, err := os.Stat(ran); err == nil {
		t.Error("one of them was run")
	}
}

// What was checked is what runs, whatever has the name by then.
func TestProgramReplacedBetweenCheckAndExec(t *testing.T) {
	b, _ := askedBy(t, "echo checked")
	file, err := openProgram(b.cfg.Programs[0], b.cfg.Owner)
	check.Must(t, err)
	defer closeFile(file)
	b.program(t, "runtime", "echo another")
	ended, err := runProgram(t.Context(), file, b.cfg.Programs[0], []string{"stats"})
	check.Must(t, err)
	if ended.answer != "checked\n" {
		t.Errorf("%q ran", ended.answer)
	}
}
