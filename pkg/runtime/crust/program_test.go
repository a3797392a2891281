package crust

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
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
			handlers.WantError(t, check.Err(b.h.Stats(check.Within(t, 10*time.Second), v)), c.kind, v, "sb1", c.text)
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
		handlers.WantError(t, check.Err(b.h.Resize(t.Context(), v, volume.Range{Required: 1024, Limit: 4096})), volume.Absurd, v, "sb1", text)
	}
	b, v := askedBy(t, `echo '{"capacityBytes":"'$4'"}'`)
	size, err := b.h.Resize(t.Context(), v, volume.Range{Required: 5})
	check.That(t, err == nil && size == 5, "%d, %v", size, err)
}

// TestProgramsSurroundings has the program tell what it was given.
func TestProgramsSurroundings(t *testing.T) {
	t.Setenv("SECRET_OF_OURS", "1")
	out := filepath.Join(check.ShortDir(t), "out")
	b, v := askedBy(t, `{ echo "$@"; env; pwd; cat; ls -l /proc/self/fd; } > `+out+` 2>&1; echo '{}'`)
	check.Must(t, b.h.Freeze(t.Context(), v, 3*time.Second+time.Millisecond))
	said := string(check.Value(os.ReadFile(out))(t))
	check.That(t, strings.HasPrefix(said, "crust freeze "+v.ResolvedTarget+" 3\n"), "arguments: %s", said)
	for _, bad := range []string{"SECRET_OF_OURS", "HOME=", "socket:", "inotify"} {
		check.That(t, !strings.Contains(said, bad), "it was given %s:\n%s", bad, said)
	}
	check.Says(t, "the program", said, "LC_ALL=C", "PATH=/usr/sbin:", "\n/\n", "-> /dev/null")
}

// TestFreezeThatIsKilled may have frozen the volume, and Timeout has the caller thaw it.
func TestFreezeThatIsKilled(t *testing.T) {
	for _, script := range []string{"kill -9 $$", "cat /dev/zero"} {
		b, v := askedBy(t, script)
		handlers.WantError(t, b.h.Freeze(t.Context(), v, 3*time.Second), volume.Timeout, v, "sb1", "was killed")
	}
}

// A program that hangs goes at the deadline, and all its children with it.
func TestHungProgramIsKilledWithItsChildren(t *testing.T) {
	pids := filepath.Join(check.ShortDir(t), "pids")
	b, v := askedBy(t, `sleep 1000 & echo $! > `+pids+`; echo $$ >> `+pids+`; trap "" TERM INT HUP; wait; sleep 1000`)
	var found []string
	for allowed := time.Second; len(found) < 2; allowed *= 2 { // until it has come to hang
		ctx, cancel := context.WithTimeout(t.Context(), allowed)
		begin := time.Now()
		_, err := b.h.Stats(ctx, v)
		cancel()
		handlers.WantError(t, err, volume.Timeout, v, "sb1", "in time")
		took := time.Since(begin) // and not the 1000 seconds of the program
		check.Require(t, took <= allowed+20*time.Second, "it took %v", took)
		raw, _ := os.ReadFile(pids)
		found = strings.Fields(string(raw))
	}
	for _, text := range found {
		pid := check.Value(strconv.Atoi(text))(t)
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

// TestProgramThatDoesNotEnd: a killed program that hangs in the kernel is left behind. The same question is not put
// again until it has ended; other questions are.
func TestProgramThatDoesNotEnd(t *testing.T) {
	goes := filepath.Join(check.ShortDir(t), "goes")
	b, v := askedBy(t, `[ $2 = stats ] && until [ -e `+goes+` ]; do >`+goes+`.began; sleep 0.01; done; echo '{"usage":[{"total":10,"unit":"BYTES"}]}'`)
	programs := b.h.asker.programs
	programs.kill, programs.patience = func(int) error { return nil }, time.Millisecond
	for allowed := time.Second; hanging(programs) == 0; allowed *= 2 { // until it has come to hang
		ctx, cancel := context.WithTimeout(t.Context(), allowed)
		_, err := b.h.Stats(ctx, v)
		cancel()
		handlers.WantError(t, err, volume.Timeout, v, "sb1", "in time")
		check.Eventually(t, "it hangs, or was never started", func() bool { return hanging(programs) == 0 || check.Err(os.Stat(goes+".began")) == nil })
	}
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Timeout, v, "sb1", "an earlier one hangs")
	check.Must(t, b.h.Thaw(t.Context(), v))
	check.Must(t, os.WriteFile(goes, nil, 0o600))
	check.Succeeds(t, "it has ended", func() error { _, err := b.h.Stats(t.Context(), v); return err })
}

// TestSweepThatDoesNotEnd does not keep the next ones from being made.
func TestSweepThatDoesNotEnd(t *testing.T) {
	b := newBench(t, byProgram)
	b.cfg.Programs = []string{b.program(t, "sweeper", `[ -e `+b.dir+`/goes ] && echo '{"thawed":["a"]}' && exit; until [ -e `+b.dir+`/goes ]; do sleep 0.01; done`)}
	e := newExpiry(b.cfg, zap.NewNop())
	e.runs.kill, e.runs.patience = func(int) error { return nil }, time.Millisecond
	for allowed := 100 * time.Millisecond; hanging(e.runs) < 2; allowed *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), allowed)
		_, err := e.ask(ctx, b.cfg.Programs[0])
		cancel()
		check.That(t, err != nil, "it has ended")
	}
	check.Must(t, os.WriteFile(b.dir+"/goes", nil, 0o600))
	reply, err := e.ask(t.Context(), b.cfg.Programs[0])
	check.That(t, err == nil && len(reply.Thawed) == 1, "%v, %v", reply, err)
	check.Eventually(t, "the others have ended", func() bool { return hanging(e.runs) == 0 })
}

// hanging is how many programs were left behind.
func hanging(r *runner) (all int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.hung {
		all += one
	}
	return all
}

// A child that holds the output open does not hold up the answer.
func TestChildThatStaysBehind(t *testing.T) {
	b, v := askedBy(t, `sleep 30 & echo '{"usage":[{"total":10,"unit":"BYTES"}]}'`)
	begin := time.Now()
	_, err := b.h.Stats(t.Context(), v)
	check.That(t, err == nil && time.Since(begin) <= 20*time.Second, "after %v: %v", time.Since(begin), err)
}

func TestProgramsThatAreNotRun(t *testing.T) {
	ran := filepath.Join(check.ShortDir(t), "ran")
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
			handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), c.kind, v, "sb1", c.text)
			check.Kind(t, b.h.Health(t.Context()), c.kind)
			_, err := newExpiry(b.cfg, zap.NewNop()).ask(t.Context(), b.cfg.Programs[0])
			check.That(t, (err == nil) == (name == "missing"), "whether it thaws what has expired is not known: %v", err)
		})
	}
	b, v := askedBy(t, "touch "+ran)
	b.h.cfg.Owner = uint32(os.Getuid()) + 1
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Denied, v, "sb1", "chown")
	b.h.cfg.Owner = b.cfg.Owner
	b.leave(t, v, "sb1", b.program(t, "another", "touch "+ran), "")
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.Denied, v, "sb1", "another", "handlers.crust.programs")
	check.Fails(t, check.Err(os.Stat(ran))) // or one of them was run
}

// What was checked is what runs, whatever has the name by then.
func TestProgramReplacedBetweenCheckAndExec(t *testing.T) {
	b, _ := askedBy(t, "echo checked")
	file := check.Value(openProgram(b.cfg.Programs[0], b.cfg.Owner))(t)
	b.program(t, "runtime", "echo another")
	ended := check.Value(newRunner(1).run(t.Context(), "", file, b.cfg.Programs[0], []string{"stats"}))(t)
	check.That(t, ended.Stdout == "checked\n", "%q ran", ended.Stdout)
}

// sweeper runs an expiry over one program, which notes how often it was asked and then does as the script says.
func sweeper(t *testing.T, script string) (e *expiry, asked func() int, logs *observer.ObservedLogs) {
	t.Helper()
	b := newBench(t, byProgram)
	notes := filepath.Join(b.dir, "asked")
	core, logs := observer.New(zapcore.WarnLevel)
	b.cfg.Programs = []string{b.program(t, "sweeper", `[ -e `+notes+` ] || first=yes; echo "$@" >> `+notes+"; "+script)}
	e = newExpiry(b.cfg, zap.New(core))
	e.late = time.Millisecond
	asked = func() int {
		raw, _ := os.ReadFile(notes)
		if n := strings.Count(string(raw), "crust thaw-expired\n"); n*len("crust thaw-expired\n") == len(raw) {
			return n
		}
		t.Errorf("it was asked %q", raw)
		return -1
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { e.run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return e, asked, logs
}

// What is frozen for too long is asked for at the start, when the program says so, and after the end of each freeze.
func TestExpiredFreezesAreAskedFor(t *testing.T) {
	e, asked, logs := sweeper(t, `[ "$first" = yes ] || { echo '{}'; exit; }; echo '{"thawed":["abc"],"next_seconds":1}'`)
	check.Eventually(t, "asked at the start, and again", func() bool { return asked() == 2 })
	all := logs.FilterMessageSnippet("has been thawed").All()
	check.That(t, len(all) == 1 && all[0].ContextMap()["key"] == "abc", "the log says %v", logs.All())
	e.frozen(time.Hour)
	e.frozen(time.Millisecond)
	check.Eventually(t, "asked after a freeze", func() bool { return asked() == 3 })
}

// A program that cannot do it is not asked in vain, and one that fails is told of.
func TestProgramsThatThawNothing(t *testing.T) {
	for script, problem := range map[string]string{
		"exit 2":                       "",
		"exit 4":                       "",
		"echo '{}'":                    "",
		"echo no luck >&2; exit 1":     "no luck",
		"exit 1":                       "status 1 and no reason",
		"yes":                          "65536",
		"echo '{'":                     "cannot be read",
		`echo '{"problem":"no luck"}'`: "no luck",
	} {
		_, asked, logs := sweeper(t, script)
		check.Eventually(t, script, func() bool { return asked() == 1 && (problem == "" || logs.Len() == 1) })
		check.That(t, (problem != "" || logs.Len() == 0) && (problem == "" || strings.Contains(fmt.Sprint(logs.All()[0].ContextMap()["error"]), problem)),
			"%s: the log says %v", script, logs.All())
	}
}

// FuzzStats takes both forms of an answer: what comes through is sane.
func FuzzStats(f *testing.F) {
	for _, seed := range []string{
		`{"usage":[{"available":7,"total":10,"used":3,"unit":"BYTES"}],"volume_condition":{"abnormal":true,"message":"x","reason":"Read Only"}}`,
		`{"usage":[{"available":"7","total":"10","unit":2}],"volumeCondition":{}}`, `{"usage":[null]}`, `{}`,
		`{"usage":[{"total":-1,"unit":"BYTES"}]}`, "\x0a\x04\x10\x01\x20\x01",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var byProgram, bySocket handlerv1.GetVolumeStatsResponse
		if (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, &byProgram) == nil {
			sane(t, &byProgram)
		}
		if proto.Unmarshal(raw, &bySocket) == nil {
			sane(t, &bySocket)
		}
	})
}

func sane(t *testing.T, said *handlerv1.GetVolumeStatsResponse) {
	report, err := readReport(said)
	if err != nil {
		return
	}
	check.Require(t, len(report.Usage) <= 2 && (len(report.Usage) != 0 || report.Condition != nil), "taken: %+v", report)
	for _, u := range report.Usage {
		check.Require(t, u.Unit != volume.UnitUnknown && u.Total > 0 && u.Used >= 0 && u.Available >= 0 && u.Used <= u.Total && u.Available <= u.Total,
			"taken: %+v", u)
	}
	word := regexp.MustCompile(`^[A-Za-z]{0,64}$`)
	c := report.Condition
	check.Require(t, c == nil || sys.IsText(c.Message) && len(c.Message) <= 1<<10 && word.MatchString(c.Reason), "taken: %+v", c)
}

// TestReasonOfACondition: it ends in the status of a pod, which the Kubernetes API checks.
func TestReasonOfACondition(t *testing.T) {
	for said, want := range map[string]string{
		"ReadOnly": "ReadOnly", "read only": "", "Ärger": "", "A1": "", strings.Repeat("x", 64): strings.Repeat("x", 64), strings.Repeat("x", 65): "",
	} {
		byProgram := &handlerv1.GetVolumeStatsResponse{}
		check.Must(t, protojson.Unmarshal(fmt.Appendf(nil, `{"volume_condition":{"abnormal":true,"message":"m","reason":%q}}`, said), byProgram))
		report, err := readReport(byProgram)
		check.That(t, err == nil && report.Condition.Reason == want, "%q: %+v, %v", said, report.Condition, err)
	}
}
