package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestABadFileKeepsTheOldRules and says so loudly.
func TestABadFileKeepsTheOldRules(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(rules string) {
		if err := os.WriteFile(file, []byte("policy: {rules: "+rules+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("[{name: old, drivers: [lvm], defer: true}]")
	s, logs := settingsOf(t, file)
	cfg := s.get()
	for _, bad := range []string{
		"[{name: new, defer: maybe}]", "[{name: new}]", "[{name: a, defer: true}, {name: b, defer: true}]", "[", "[{nam: x}]",
	} {
		write(bad)
		s.reload()
		if got := s.get(); got != cfg || len(got.Policy.Rules) != 1 || got.Policy.Rules[0].Name != "old" {
			t.Errorf("%s: in force is %+v", bad, got.Policy)
		}
		if told := logs.TakeAll(); len(told) == 0 || told[0].Level != zapcore.ErrorLevel {
			t.Errorf("%s: told %+v", bad, told)
		}
	}
}

// settingsOf starts with a file as the daemon does.
func settingsOf(t *testing.T, file string, args ...string) (*settings, *observer.ObservedLogs) {
	t.Helper()
	s, logs, err := startOf(t, file, args...)
	if err != nil {
		t.Fatal(err)
	}
	return s, logs
}

func startOf(t *testing.T, file string, args ...string) (*settings, *observer.ObservedLogs, error) {
	t.Helper()
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := config.AddFlags(set)
	if err := set.Parse(append(args, "--config", file)); err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	s := &settings{flags: flags, log: zap.New(core), apply: func(*config.Config) {}}
	cfg, err := s.load()
	s.inForce.Store(&cfg)
	return s, logs, err
}

// node is a configuration file, and where the accepted one is kept.
type node struct {
	*testing.T
	file, accepted string
}

func newNode(t *testing.T) node {
	dir := t.TempDir()
	return node{t, filepath.Join(dir, "config.yaml"), filepath.Join(dir, "lib", "crust-proxy", "accepted.yaml")}
}

const (
	oldRules = "policy: {rules: [{name: old, drivers: [lvm], defer: true}]}\n"
	newRules = "policy: {rules: [{name: new, drivers: [lvm], defer: true}]}\n"
)

func (n node) write(text string) {
	n.Helper()
	if err := errors.Join(os.RemoveAll(n.file), os.WriteFile(n.file, []byte(text), 0o600)); err != nil {
		n.Fatal(err)
	}
}

// start starts a daemon, which serves.
func (n node) start(args ...string) (*settings, *observer.ObservedLogs) {
	n.Helper()
	s, logs := settingsOf(n.T, n.file, append(args, "--accepted", n.accepted)...)
	s.keep()
	return s, logs
}

// want compares the rule in force, and what the one finding says about the file; "" is no finding.
func (n node) want(when string, s *settings, rule string, says ...string) {
	n.Helper()
	if got := s.get().Policy.Rules; len(got) != 1 || got[0].Name != rule {
		n.Errorf("%s: in force is %+v, want %s", when, got, rule)
	}
	found := slices.DeleteFunc(s.findings(), func(text string) bool { return strings.Contains(text, "rarely meant") })
	if len(found) != min(len(says), 1) {
		n.Errorf("%s: findings %q", when, found)
	}
	for _, word := range says {
		if len(found) > 0 && !strings.Contains(found[0], word) {
			n.Errorf("%s: the finding does not say %q: %s", when, word, found[0])
		}
	}
	var state telemetry.NodeState
	s.measure(n.Context(), &state)
	if bad := len(says) > 0 && strings.Contains(says[0], "is bad since"); state.ConfigBadSince.IsZero() == bad {
		n.Errorf("%s: the metric has the file bad since %v", when, state.ConfigBadSince)
	}
}

// TestStartWithABadFile: however bad the file is, the daemon starts with the one that was accepted
// last, again and again, until the file is mended.
func TestStartWithABadFile(t *testing.T) {
	for name, spoil := range map[string]func(node) error{
		"syntax":    func(n node) error { return os.WriteFile(n.file, []byte("policy: ["), 0o600) },
		"a value":   func(n node) error { return os.WriteFile(n.file, []byte("relay: {maxSlow: 0}"), 0o600) },
		"too big":   func(n node) error { return os.Truncate(n.file, 2<<20) },
		"missing":   func(n node) error { return os.Remove(n.file) },
		"directory": func(n node) error { return errors.Join(os.Remove(n.file), os.Mkdir(n.file, 0o700)) },
		"a loop":    func(n node) error { return errors.Join(os.Remove(n.file), os.Symlink(n.file, n.file)) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.write(oldRules)
			first, _ := n.start()
			n.want("at first", first, "old")
			if info, err := os.Stat(n.accepted); err != nil || info.Mode() != 0o600 {
				t.Fatalf("kept: %v, %v", info, err)
			}
			if err := spoil(n); err != nil {
				t.Fatal(err)
			}
			first.reload()
			n.want("reloaded", first, "old", "is bad since", "in force before it stays")
			for range 2 { // the second start finds what the first one left
				s, logs := n.start("--log-level", "debug")
				n.want("started", s, "old", "is bad since", "accepted at", s.file().bad.Error())
				if told := logs.FilterLevelExact(zapcore.ErrorLevel).All(); len(told) == 0 || s.get().Log.Level != "debug" {
					t.Errorf("told %v; the flag gives way: %+v", told, s.get().Log)
				}
				s.reload()
				n.want("reloaded", s, "old", "is bad since", "accepted at")
			}
			s, _ := n.start()
			n.write(newRules)
			s.reload()
			n.want("mended", s, "new")
			n.write("{")
			s, _ = n.start()
			n.want("bad again", s, "new", "is bad since", "accepted at")
		})
	}
}

// TestStartWithoutAnAcceptedFile fails with what is wrong with the file.
func TestStartWithoutAnAcceptedFile(t *testing.T) {
	for name, prepare := range map[string]func(node) error{
		"none":      func(node) error { return nil },
		"bad":       func(n node) error { return os.WriteFile(n.accepted, []byte("gone: 1"), 0o600) },
		"directory": func(n node) error { return os.Mkdir(n.accepted, 0o700) },
	} {
		n := newNode(t)
		n.write("nam: 1")
		if err := errors.Join(os.MkdirAll(filepath.Dir(n.accepted), 0o700), prepare(n)); err != nil {
			t.Fatal(err)
		}
		if _, logs, err := startOf(t, n.file, "--accepted", n.accepted); err == nil || !strings.Contains(err.Error(), "nam: ") ||
			(name != "none") != (logs.FilterMessageSnippet("cannot be used either").Len() == 1) {
			t.Errorf("%s: %v; log %v", name, err, logs.All())
		}
	}
	n := newNode(t)
	n.write(oldRules)
	s, _ := settingsOf(t, n.file)
	s.keep()
	if left, err := os.ReadDir(filepath.Dir(n.file)); err != nil || len(left) != 1 {
		t.Errorf("without --accepted there is %v, %v", left, err)
	}
}

// TestFileThatDoesNotStart is loaded, and then the daemon cannot start with it.
func TestFileThatDoesNotStart(t *testing.T) {
	n, cause := newNode(t), errors.New("volumes live")
	n.write(oldRules)
	s, _ := n.start()
	if _, err := s.fallBack(cause); !errors.Is(err, cause) {
		t.Errorf("the accepted file is the same: %v", err)
	}
	n.write(newRules)
	fail := func() *settings {
		s, _ := settingsOf(t, n.file, "--accepted", n.accepted)
		cfg, err := s.fallBack(cause)
		if err != nil {
			t.Fatal(err)
		}
		s.put(&cfg)
		return s
	}
	s = fail()
	s.keep()
	n.want("started", s, "old", "is bad since", "accepted at", "volumes live")
	if _, err := s.fallBack(cause); !errors.Is(err, cause) {
		t.Errorf("a second time: %v", err)
	}
	s.reload()
	n.want("reloaded", s, "old", "is bad since", "volumes live")
	n.write("{")
	s.reload()
	n.write(newRules)
	s.reload()
	n.want("changed there and back", s, "old", "is bad since", "volumes live")
	n.write(newRules + "# mended\n")
	s.reload()
	n.want("mended", s, "new")
	n.write(oldRules)
	s, _ = settingsOf(t, n.file, "--accepted", n.accepted)
	s.settled = true
	if _, err := s.fallBack(cause); !errors.Is(err, cause) {
		t.Errorf("after the node was changed: %v", err)
	}
}

// TestBadSince is when the file was changed, and not when the daemon started.
func TestBadSince(t *testing.T) {
	n := newNode(t)
	n.write("{")
	var st unix.Stat_t
	check.Must(t, unix.Stat(n.file, &st))
	changed := time.Unix(st.Ctim.Unix())
	for name, c := range map[string]struct {
		file           string
		good, from, to time.Time
	}{
		"changed":         {n.file, changed.Add(-time.Hour), changed, changed},
		"a newer program": {n.file, changed.Add(time.Second), changed.Add(time.Second), changed.Add(time.Second)},
		"missing":         {n.file + ".not", changed, changed, time.Now().Add(time.Minute)},
	} {
		if got := changedAfter(c.file, c.good); got.Before(c.from) || got.After(c.to) {
			t.Errorf("%s: since %v, want %v to %v", name, got, c.from, c.to)
		}
	}
}

// TestWhatCannotBeKept is a finding until it can.
func TestWhatCannotBeKept(t *testing.T) {
	n := newNode(t)
	n.write(oldRules)
	inTheWay := filepath.Dir(filepath.Dir(n.accepted))
	check.Must(t, os.WriteFile(inTheWay, nil, 0o600))
	s, logs := n.start()
	n.want("not kept", s, "old", "could not start", n.accepted)
	if told := logs.FilterLevelExact(zapcore.ErrorLevel).Len(); told != 1 {
		t.Errorf("told %v", logs.All())
	}
	check.Must(t, os.Remove(inTheWay))
	s.reload()
	n.want("kept", s, "old")
}

// TestChangeThatNeedsARestart is a finding until it is reverted, and is not kept: a start with it was
// never tried.
func TestChangeThatNeedsARestart(t *testing.T) {
	n := newNode(t)
	n.write(oldRules)
	s, logs := n.start()
	logs.TakeAll()
	n.write(newRules + "http: {pprof: true}\nreconcileInterval: 2m\n")
	for range 2 { // SIGHUP, and the watcher
		s.reload()
		n.want("reloaded", s, "new", "restarted", "http.pprof", "reconcileInterval")
	}
	if told := logs.FilterLevelExact(zapcore.InfoLevel).All(); len(told) != 1 || told[0].Message != "configuration reloaded" {
		t.Errorf("one change, told %v", told)
	}
	if kept, err := os.ReadFile(n.accepted); err != nil || string(kept) != oldRules {
		t.Errorf("kept is %q, %v", kept, err)
	}
	n.write(newRules)
	s.reload()
	n.want("reverted", s, "new")
	if kept, err := os.ReadFile(n.accepted); err != nil || string(kept) != newRules {
		t.Errorf("kept is %q, %v", kept, err)
	}
}

// TestWhatIsRarelyMeantIsReported at the start and at each reload, not by validate alone.
func TestWhatIsRarelyMeantIsReported(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("policy: {rules: [{name: disks, defer: true}]}\n") // without the front
	s, logs := settingsOf(t, file)
	s.put(s.get())
	reported := func(when string, want int) {
		t.Helper()
		warned, found := logs.FilterLevelExact(zapcore.WarnLevel).All(), s.findings()
		logs.TakeAll()
		if len(warned) != want || len(found) != want || want > 0 && (!strings.Contains(found[0], "front.enabled is false") ||
			!strings.Contains(fmt.Sprint(warned[0].ContextMap()), "front.enabled is false")) {
			t.Errorf("%s: log %v, findings %q", when, warned, found)
		}
	}
	reported("at the start", 1)
	write("policy: {rules: [{name: others, defer: true}]}\n")
	s.reload()
	reported("after a reload", 1)
	write("{}\n")
	s.reload()
	reported("after it was mended", 0)
}
