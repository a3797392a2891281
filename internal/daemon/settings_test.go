package daemon

import (
	"errors"
	"fmt"
	"iter"
	"net"
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

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/systemd"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// node is a configuration file, and where the accepted one is kept.
type node struct {
	*testing.T
	file, accepted string
	logs           *observer.ObservedLogs
}

func newNode(t *testing.T, text string) *node {
	dir := t.TempDir()
	n := &node{T: t, file: filepath.Join(dir, "config.yaml"), accepted: filepath.Join(dir, "lib", "crust-proxy", "accepted.yaml")}
	n.write(text)
	return n
}

const (
	oldRules = "policy: {rules: [{name: old, drivers: [lvm], defer: true}]}\n"
	newRules = "policy: {rules: [{name: new, drivers: [lvm], defer: true}]}\n"
)

func (n *node) write(text string) {
	n.Helper()
	check.Must(n.T, errors.Join(os.RemoveAll(n.file), os.WriteFile(n.file, []byte(text), 0o600)))
}

// load loads the file as a daemon does that starts.
func (n *node) load(args ...string) (*settings, error) {
	n.Helper()
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := config.AddFlags(set)
	check.Must(n.T, set.Parse(append(args, "--config", n.file)))
	var core zapcore.Core
	core, n.logs = observer.New(zapcore.DebugLevel)
	s := &settings{flags: flags, log: zap.New(core), apply: func(*config.Config) {}}
	cfg, err := s.load()
	s.put(&cfg)
	return s, err
}

// start starts a daemon, which serves.
func (n *node) start(args ...string) *settings {
	n.Helper()
	s := check.Value(n.load(append(args, "--accepted", n.accepted)...))(n.T)
	s.keep()
	return s
}

// want compares the rule in force, and what the one finding says about the file; nothing is no finding.
func (n *node) want(when string, s *settings, rule string, says ...string) {
	n.Helper()
	got := s.get().Policy.Rules
	check.That(n, len(got) == 1 && got[0].Name == rule, "%s: in force is %+v, want %s", when, got, rule)
	found, warnings := s.findings()
	bad := slices.Contains(says, "is bad since")
	check.That(n, len(found) > 0 == bad, "%s: the errors are %q", when, found)
	found = append(found, slices.DeleteFunc(warnings, func(text string) bool { return strings.Contains(text, "rarely meant") })...)
	check.That(n, len(found) == min(len(says), 1), "%s: findings %q", when, found)
	check.Says(n, when+": the finding", strings.Join(found, "\n"), says...)
	var state telemetry.NodeState
	s.measure(n.Context(), &state)
	check.That(n, state.ConfigBadSince.IsZero() != bad && (!bad || n.logs.FilterLevelExact(zapcore.ErrorLevel).Len() > 0),
		"%s: the metric has the file bad since %v; log %v", when, state.ConfigBadSince, n.logs.All())
}

func (n *node) wantKept(want string) {
	n.Helper()
	check.Equal(n, string(check.Value(os.ReadFile(n.accepted))(n)), want, "kept is")
}

// TestStartWithABadFile: however bad the file is, the daemon goes on and starts with the one that was
// accepted last, again and again, until the file is mended.
func TestStartWithABadFile(t *testing.T) {
	for name, spoil := range map[string]func(*node) error{
		"syntax":    func(n *node) error { return os.WriteFile(n.file, []byte("policy: ["), 0o600) },
		"a rule":    func(n *node) error { return os.WriteFile(n.file, []byte("policy: {rules: [{name: new}]}"), 0o600) },
		"a value":   func(n *node) error { return os.WriteFile(n.file, []byte("relay: {maxSlow: 0}\nrunDir: x"), 0o600) },
		"too big":   func(n *node) error { return os.Truncate(n.file, 2<<20) },
		"missing":   func(n *node) error { return os.Remove(n.file) },
		"directory": func(n *node) error { return errors.Join(os.Remove(n.file), os.Mkdir(n.file, 0o700)) },
		"a loop":    func(n *node) error { return errors.Join(os.Remove(n.file), os.Symlink(n.file, n.file)) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, oldRules)
			s := n.start()
			n.want("at first", s, "old")
			check.Equal(t, check.Value(os.Stat(n.accepted))(t).Mode(), 0o600, "the mode of what is kept is")
			check.Must(t, spoil(n))
			s.reload()
			n.want("reloaded", s, "old", "is bad since", "in force before it stays")
			for range 2 { // the second start finds what the first one left
				before := time.Now()
				s = n.start("--log-level", "debug")
				n.want("started", s, "old", "is bad since", "accepted at", strings.ReplaceAll(s.file().bad.Error(), "\n", "; "))
				_, err := os.Stat(n.file)
				check.That(t, err != nil || !s.file().badSince.After(before), "bad since %v, and it was started at %v", s.file().badSince, before)
				check.That(t, s.get().Log.Level == "debug", "the flag gives way")
				since, told := s.file().badSince, n.logs.Len()
				s.reload()
				n.want("reloaded", s, "old", "is bad since", "accepted at")
				check.That(t, s.file().badSince.Equal(since) && n.logs.Len() == told,
					"bad since %v, now since %v; log %v", since, s.file().badSince, n.logs.All())
			}
			n.write(newRules)
			s.reload()
			n.want("mended", s, "new")
			n.write("{")
			n.want("bad again", n.start(), "new", "is bad since", "accepted at")
		})
	}
}

// TestStartWithoutAnAcceptedFile fails with what is wrong with the file.
func TestStartWithoutAnAcceptedFile(t *testing.T) {
	for name, prepare := range map[string]func(*node) error{
		"none":      func(*node) error { return nil },
		"bad":       func(n *node) error { return os.WriteFile(n.accepted, []byte("gone: 1"), 0o600) },
		"directory": func(n *node) error { return os.Mkdir(n.accepted, 0o700) },
	} {
		n := newNode(t, "nam: 1")
		check.Must(t, errors.Join(os.MkdirAll(filepath.Dir(n.accepted), 0o700), prepare(n)))
		_, err := n.load("--accepted", n.accepted)
		check.That(t, err != nil && strings.Contains(err.Error(), "nam: ") &&
			(name != "none") == (n.logs.FilterMessageSnippet("cannot be used either").Len() == 1), "%s: %v; log %v", name, err, n.logs.All())
	}
	n := newNode(t, oldRules)
	check.Value(n.load())(t).keep()
	check.Equal(t, len(check.Value(os.ReadDir(filepath.Dir(n.file)))(t)), 1, "files without --accepted")
}

// TestFileThatDoesNotStart is loaded, and then the daemon cannot start with it.
func TestFileThatDoesNotStart(t *testing.T) {
	n, cause := newNode(t, oldRules), errors.New("volumes live")
	stays := func(when string, s *settings) {
		t.Helper()
		_, err := s.fallBack(cause)
		check.That(t, errors.Is(err, cause), "%s: %v", when, err)
	}
	stays("the accepted file is the same", n.start())
	n.write(newRules)
	s := check.Value(n.load("--accepted", n.accepted))(t)
	s.settled = true
	stays("the node was changed", s)
	s.settled = false
	cfg := check.Value(s.fallBack(cause))(t)
	s.put(&cfg)
	s.keep()
	n.wantKept(oldRules)
	stays("a second time", s)
	n.want("started", s, "old", "is bad since", "accepted at", "volumes live")
	for _, text := range []string{newRules, "{", newRules} {
		n.write(text)
		s.reload()
		n.want("changed", s, "old", "is bad since")
	}
	n.want("changed there and back", s, "old", "is bad since", "volumes live")
	n.write(newRules + "# mended\n")
	s.reload()
	n.want("mended", s, "new")
}

// TestBadForANewerProgram: the file is older than the last start with it.
func TestBadForANewerProgram(t *testing.T) {
	n := newNode(t, "{")
	check.Must(t, os.MkdirAll(filepath.Dir(n.accepted), 0o700))
	time.Sleep(20 * time.Millisecond) // the kernel's clock for files has ticks
	check.Must(t, os.WriteFile(n.accepted, []byte(oldRules), 0o600))
	file := n.start().file()
	check.That(t, file.badSince.Equal(file.accepted) && file.badSince.After(changedAt(n.file)), "changed at %v, it is %+v", changedAt(n.file), file)
}

// TestWhatCannotBeKept is a finding until it can.
func TestWhatCannotBeKept(t *testing.T) {
	n := newNode(t, oldRules)
	inTheWay := filepath.Dir(filepath.Dir(n.accepted))
	check.Must(t, os.WriteFile(inTheWay, nil, 0o600))
	s := n.start()
	n.want("not kept", s, "old", "cannot be kept", n.accepted)
	check.That(t, n.logs.FilterLevelExact(zapcore.ErrorLevel).Len() == 1, "told %v", n.logs.All())
	check.Must(t, os.Remove(inTheWay))
	s.reload()
	n.want("kept", s, "old")
	n.wantKept(oldRules)
}

// TestReloadIsToldWhenItIsKept: who has read of it may kill the daemon.
func TestReloadIsToldWhenItIsKept(t *testing.T) {
	n := newNode(t, oldRules)
	s := n.start()
	told := false
	s.log = s.log.WithOptions(zap.Hooks(func(entry zapcore.Entry) error {
		if entry.Message == "configuration reloaded" {
			told = true
			n.wantKept(newRules)
		}
		return nil
	}))
	n.write(newRules)
	s.reload()
	check.That(t, told, "nothing was told of the reload")
}

// TestChangeThatNeedsARestart is a finding until it is reverted, and is not kept: a start with it was never tried.
func TestChangeThatNeedsARestart(t *testing.T) {
	n := newNode(t, oldRules)
	s := n.start()
	n.write(newRules + "http: {pprof: true}\nreconcileInterval: 2m\n")
	for range 2 { // SIGHUP, and the watcher
		s.reload()
		n.want("reloaded", s, "new", "restarted", "http.pprof", "reconcileInterval")
	}
	told := n.logs.FilterLevelExact(zapcore.InfoLevel).All()
	check.That(t, len(told) == 1 && told[0].Message == "configuration reloaded", "one change, told %v", told)
	n.wantKept(oldRules)
	n.write(newRules)
	s.reload()
	n.want("reverted", s, "new")
	n.wantKept(newRules)
}

// TestFileThatLosesTheFront, as one that a full disk has cut, leaves the rules in force, whether drivers are behind the
// front or not.
func TestFileThatLosesTheFront(t *testing.T) {
	n, run := newNode(t, "front: {enabled: true}\n"+oldRules), t.TempDir()
	root, registry := rootWith(t, "ebs")
	s := n.start("--run-dir", run, "--kubelet-root", root)
	driverWasHere(t, s)
	n.write("")
	s.reload()
	n.want("with a driver behind the front", s, "old", "is bad since", "behind the front: ebs")
	check.Must(t, os.RemoveAll(registry))
	s.reload()
	n.want("without", s, "old", "restarted", "front.enabled", "policy.rules")
}

// TestWhatIsRarelyMeantIsReported at the start and at each reload, not by validate alone.
func TestWhatIsRarelyMeantIsReported(t *testing.T) {
	n := newNode(t, oldRules) // without the front
	reported := func(when string, s *settings, want int) {
		t.Helper()
		_, found := s.findings()
		warned := n.logs.FilterLevelExact(zapcore.WarnLevel).All()
		n.logs.TakeAll()
		check.That(t, len(warned) == want && len(found) == want && (want == 0 || strings.Contains(found[0], "front.enabled is false") &&
			strings.Contains(fmt.Sprint(warned[0].ContextMap()), "front.enabled is false")), "%s: log %v, findings %q", when, warned, found)
	}
	s := n.start()
	reported("at the start", s, 1)
	n.write(newRules)
	s.reload()
	reported("after a reload", s, 1)
	n.write("{}\n")
	s.reload()
	reported("after it was mended", s, 0)
}

// TestUnusableAddressIsReported to crustctl version.
func TestUnusableAddressIsReported(t *testing.T) {
	n := newNode(t, "http: {listen: '192.0.2.1:9814'}\n") // of no node
	d := &daemon{settings: n.start(), openers: openers.New(), mounted: &hostMounts{volumes: func() iter.Seq[deferral.Status] { return slices.Values([]deferral.Status{}) }}}
	d.http = &telemetry.Server{Listen: d.settings.get().HTTP.Listen, Log: zap.NewNop()}
	d.http.Bind(t.Context())
	check.Says(t, "the reported problem", d.Describe(t.Context(), false).GetHttpProblem(), "192.0.2.1:9814")
}

// TestPublicFindingsQuoteNothing: the page without login says that the configuration is bad, or has warnings, and no more.
func TestPublicFindingsQuoteNothing(t *testing.T) {
	n := newNode(t, oldRules) // without the front
	s := n.start()
	all := parts{s}
	_, warned := all.findings(false)
	_, public := all.findings(true)
	check.That(t, strings.Contains(warned[0], "front.enabled") && len(public) == 1 && !strings.Contains(public[0], "front.enabled"), "%q %q", warned, public)
	n.write("policy: {rules: [{name: secret-of-shop, handler: gone}]}\n")
	s.reload()
	bad, _ := all.findings(false)
	hidden, _ := all.findings(true)
	check.That(t, strings.Contains(bad[0], "secret-of-shop") && len(hidden) == 1 && strings.Contains(hidden[0], "see crustctl doctor") &&
		!strings.Contains(hidden[0], "secret-of-shop"), "%q %q", bad, hidden)
}

// TestPassedSocketOutlivesAFailedStart: the second start, with the accepted configuration, serves it.
func TestPassedSocketOutlivesAFailedStart(t *testing.T) {
	n := newNode(t, "adminSocket: {path: /proc/none/admin.sock}\n")
	passed := check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")}))(t)
	defer func() { check.Must(t, passed.Close()) }()
	d := &daemon{
		settings: n.start(), log: zap.NewNop(), metrics: telemetry.NewMetrics("v"), node: &admin.Node{}, http: &telemetry.Server{},
		passed: &systemd.Inherited{Listeners: map[string]net.Listener{"runtime": passed}},
	}
	check.Fails(t, check.Err(d.newServers(d.settings.get())))
	check.Must(t, passed.SetDeadline(time.Now()))
	check.Is(t, check.Err(passed.Accept()), os.ErrDeadlineExceeded) // nobody can serve it any more
}

// TestTasksOfTheUnit: where its tasks end Go ends the daemon, however many threads and programs hang.
func TestTasksOfTheUnit(t *testing.T) {
	_, rest, _ := strings.Cut(string(check.Value(os.ReadFile("../../systemd/crust-proxy.service"))(t)), "\nTasksMax=")
	var tasks int
	check.Must(t, check.Err(fmt.Sscan(rest, &tasks)))
	relay, programs, calls := config.Default().Relay, 8, 4096
	least := 2*claim.MostHung + (relay.Concurrency+relay.MaxSlow)*(1+programs) + calls
	check.That(t, tasks >= least, "TasksMax=%d is less than %d", tasks, least)
}

// TestATempDirIsNotEmptied of what others have there.
func TestATempDirIsNotEmptied(t *testing.T) {
	cfg, dir := config.Default(), t.TempDir()
	cfg.RunDir, cfg.Handlers.Crust.Root, cfg.Handlers.Crust.TempDir = dir+"/run", dir+"/root", dir
	check.Must(t, os.WriteFile(dir+"/other", nil, 0o600))
	check.Must(t, check.Err(newCrust(&daemon{log: zap.NewNop()}, &cfg)))
	check.Must(t, check.Err(os.Stat(dir+"/other")))
}
