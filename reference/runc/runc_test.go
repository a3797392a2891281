package runc

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
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

// became runs crust-runc over the telling runtime.
type became struct {
	cmd         *exec.Cmd
	out, stderr bytes.Buffer
}

func buildRunc(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "crust-runc")
	check.Run(t, exec.Command("go", "build", "-o", program, "github.com/crust-proxy/crust-proxy/cmd/crust-runc"))
	return program
}

func newBecame(t *testing.T, program string, env []string, args ...string) *became {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/runtime", []byte(tellingRuntime), 0o700)) //nolint:gosec // a program
	check.Must(t, os.WriteFile(dir+"/c.json", check.Value(json.Marshal(map[string]string{"runtime": dir + "/runtime", "root": dir + "/crust"}))(t), 0o600))
	b := &became{cmd: exec.Command(program, args...)}
	b.cmd.Dir = dir
	b.cmd.Env = append([]string{configVariable + "=" + dir + "/c.json", "PATH=" + os.Getenv("PATH")}, env...)
	b.cmd.Stdin = strings.NewReader("input\n")
	b.cmd.Stdout, b.cmd.Stderr = &b.out, &b.stderr
	extra := check.Value(os.CreateTemp(dir, "extra"))(t)
	t.Cleanup(func() { _ = extra.Close() })
	check.Value(extra.WriteString("a third descriptor\n"))(t)
	check.Must(t, check.Err(extra.Seek(0, 0)))
	b.cmd.ExtraFiles = []*os.File{extra}
	return b
}

func (b *became) status(t *testing.T) syscall.WaitStatus {
	t.Helper()
	var exit *exec.ExitError
	err := b.cmd.Run()
	check.Require(t, errors.As(err, &exit), "it ended with: %v\n%s", err, &b.stderr)
	status, ok := exit.Sys().(syscall.WaitStatus)
	check.Require(t, ok, "its end cannot be read: %v", exit)
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
		{},
	} {
		b := newBecame(t, program, []string{"A=1", "NOTIFY_SOCKET=/n", "EMPTY="}, args...)
		status := b.status(t)
		check.That(t, status.ExitStatus() == 77, "%q: ended with %v", args, status)
		// The same runtime, started without us in the same surroundings.
		direct := newBecame(t, filepath.Join(b.cmd.Dir, "runtime"), []string{"A=1", "NOTIFY_SOCKET=/n", "EMPTY="}, args...)
		direct.cmd.Dir, direct.cmd.Env = b.cmd.Dir, b.cmd.Env
		direct.status(t)
		want := strings.ReplaceAll(direct.out.String(), strconv.Itoa(direct.cmd.Process.Pid), strconv.Itoa(b.cmd.Process.Pid))
		diff := cmp.Diff(want, b.out.String())
		check.That(t, diff == "" && b.stderr.String() == direct.stderr.String(), "%q: %s\n%s", args, diff, &b.stderr)
		check.Says(t, strings.Join(args, " ")+" of the runtime", want, append(args, "A=1", "EMPTY=", "input", "a third descriptor")...)
	}
}

// TestVersions: container runtimes read runc's lines, which come first.
func TestVersions(t *testing.T) {
	b := newBecame(t, buildRunc(t), nil, "--version")
	b.status(t)
	out := b.out.String()
	check.That(t, !strings.HasPrefix(out, "crust-runc version") && strings.Contains(out, "\ncrust-runc version "), "%q", out)
}

func TestEndsBySignalAsRuncDoes(t *testing.T) {
	b := newBecame(t, buildRunc(t), []string{"DIE=1"}, "run", "id")
	status := b.status(t)
	check.That(t, status.Signaled() && status.Signal() == syscall.SIGTERM, "it ended with %v", status)
}

// What cannot be done is told where containerd looks for it, and where people do.
func TestFailureIsToldInTheLog(t *testing.T) {
	program := buildRunc(t)
	b := newBecame(t, program, nil, "--log", "log.json", "--log-format", "json", "create", "--bundle", ".", "id")
	check.Must(t, os.WriteFile(b.cmd.Dir+"/c.json", []byte(`{"runtime":"/does/not/exist"}`), 0o600))
	status := b.status(t)
	check.That(t, status.ExitStatus() == 1, "it ended with %v", status)
	raw := check.Value(os.ReadFile(b.cmd.Dir + "/log.json"))(t)
	var line struct{ Level, Msg, Time string }
	err := json.Unmarshal(raw, &line)
	check.That(t, err == nil && line.Level == "error" && strings.Contains(line.Msg, "/does/not/exist") && line.Time != "", "%v: %s", err, raw)
	check.That(t, strings.Contains(b.stderr.String(), line.Msg), "told: %s", &b.stderr)
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
	got := check.Value(features(`{"runtime":"` + runc + `"}`))(t)
	want := check.Value(exec.Command(runc, "features").Output())(t)
	var has struct {
		Linux *struct{ Namespaces []string }
	}
	check.Must(t, json.Unmarshal(got, &has))
	check.That(t, has.Linux != nil && len(has.Linux.Namespaces) != 0 && bytes.Equal(got, want), "it says %s, and runc %s", got, want)
	for _, bad := range []string{"{", `{"runtime":"/nonexistent"}`} {
		got, err = features(bad)
		check.That(t, err != nil && len(got) == 0, "with the configuration %s it says %q, %v", bad, got, err)
	}
}

// crust runs a command of our own over a root of its own.
func crust(t *testing.T, root string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.json")
	raw := check.Value(json.Marshal(map[string]any{"root": root, "stateDir": filepath.Join(filepath.Dir(root), "state"), "ofANewerVersion": true}))(t)
	check.Must(t, os.WriteFile(file, raw, 0o600))
	t.Setenv(configVariable, file)
	var out, told bytes.Buffer
	status = crustMain(args, &out, &told)
	return status, out.String(), told.String()
}

func TestExitStatus(t *testing.T) {
	root := filepath.Join(t.TempDir(), "crust")
	target := "/a/target"
	dir := filepath.Join(root, abi.DirName(target))
	check.Must(t, os.MkdirAll(dir, 0o700))
	info := `{"volume-type":"block","device":"/dev/null","fstype":"ext4","metadata":{"crust.targetPath":"/a/target"}}`
	check.Must(t, os.WriteFile(dir+"/"+abi.InfoName, []byte(info), 0o600))
	for name, c := range map[string]struct {
		args []string
		want int
		told string
	}{
		"nothing":            {nil, abi.ExitUsage, "a command is missing; see `crust-runc crust help`"},
		"unknown":            {[]string{"eat", target}, abi.ExitUsage, `there is no command "eat"; see`},
		"too few":            {[]string{"resize", target, "1"}, abi.ExitUsage, "resize takes 3, not 2; see"},
		"too many":           {[]string{"stats", target, "1"}, abi.ExitUsage, "stats takes 1, not 2; see"},
		"negative":           {[]string{"resize", target, "-1", "0"}, abi.ExitUsage, "-1"},
		"no number":          {[]string{"freeze", target, "soon"}, abi.ExitUsage, "soon"},
		"relative":           {[]string{"stats", "a"}, abi.ExitUsage, "absolute"},
		"unknown volume":     {[]string{"stats", "/b"}, abi.ExitNoSandbox, "/b"},
		"no sandbox":         {[]string{"stats", target}, abi.ExitNoSandbox, target},
		"no sandbox, freeze": {[]string{"freeze", target, "5"}, abi.ExitNoSandbox, target},
		"not frozen":         {[]string{"thaw", target}, abi.ExitWrongState, "not frozen"},
		"no sandbox, resize": {[]string{"resize", target, "0", "0"}, abi.ExitNoSandbox, target},
	} {
		status, out, told := crust(t, root, c.args...)
		check.That(t, status == c.want && out == "" && strings.Contains(told, c.told) && strings.Count(told, "\n") == 1,
			"%s: status %d, printed %q, told %q", name, status, out, told)
	}
	status, out, _ := crust(t, root, "help")
	check.That(t, status == abi.ExitOK && strings.Contains(out, "stats  TARGET"), "help: %d, %q", status, out)
	status, out, told := crust(t, root, abi.ThawExpired)
	check.That(t, status == abi.ExitOK && told+out == `{"thawed":null,"next_seconds":0}`+"\n", "nothing is frozen: %d, %q, %q", status, out, told)
	for name, note := range map[string]string{
		"dead": `{"pid":1,"start":18446744073709551615}`, "odd": "?", "zero": `{}`, "huge": `{"pid":2147483647,"start":1}`,
	} {
		check.Must(t, os.WriteFile(dir+"/"+name, []byte(note), 0o600))
	}
	status, out, told = crust(t, root, "stats", target)
	check.That(t, status == abi.ExitNoSandbox, "a sandbox that has ended is asked: %d, %q, %q", status, out, told)
	check.Must(t, os.WriteFile(dir+"/"+abi.InfoName, []byte("?"), 0o600))
	status, _, told = crust(t, root, "stats", target)
	check.That(t, status == abi.ExitRefused && strings.Contains(told, abi.InfoName), "a bad file: %d, %q", status, told)
}

func read(t *testing.T, content string) (Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.json")
	check.Must(t, os.WriteFile(file, []byte(content), 0o600))
	return LoadConfig(func(name string) string {
		check.That(t, name == configVariable, "asked for %s", name)
		return file
	})
}

func TestConfig(t *testing.T) {
	cfg, err := read(t, `{"root":"/r","agent":false}`)
	self, _ := os.Executable()
	check.Require(t, err == nil && cfg.Root == "/r" && !cfg.Agent && cfg.StateDir == "/run/crust-runc" && cfg.Program == self, "%+v, %v", cfg, err)
	for _, bad := range []string{`{"rot":"/r"}`, `{"root":"r"}`, `{"root":"/r/"}`, `{"stateDir":"/a/../b"}`, `{`, ``, `{} {}`} {
		cfg, err = read(t, bad)
		check.That(t, err != nil, "%s: taken as %+v", bad, cfg)
	}
	check.Fails(t, check.Err(LoadConfig(func(string) string { return "/does/not/exist" }))) // or a configuration that was asked for and is not there was passed over
}

func TestRuntimeIsNotItself(t *testing.T) {
	self := check.Value(os.Executable())(t)
	link := filepath.Join(t.TempDir(), "runc")
	check.Must(t, os.Symlink(self, link))
	check.Fails(t, check.Err((Config{Runtime: link}).runtime()), "itself")
	t.Setenv("PATH", t.TempDir())
	check.Fails(t, check.Err((Config{}).runtime()), "install")
}

func TestSharedMountsAreRefused(t *testing.T) {
	for option, refused := range map[string]bool{"rshared": true, "shared": true, "rslave": false, "rprivate": false} {
		mount := specs.Mount{Options: []string{"rbind", option, "rw"}}
		for _, mounts := range [][]specs.Mount{{mount}, {{}, mount}} { // the volume's, and an ordinary one beside it
			err := checkMounts("runc", &specs.Spec{Mounts: mounts}, []*oci.Mount{{Destination: "/data"}})
			check.That(t, (err != nil) == refused, "%s, %d mounts: %v", option, len(mounts), err)
		}
	}
}

// A runtime that takes what we cannot read would show the guards.
func TestSpecThatCannotBeRead(t *testing.T) {
	bundle := t.TempDir()
	check.Must(t, os.WriteFile(bundle+"/config.json", []byte(`{"mounts": [{"source": 1}]}`), 0o600))
	c := &creator{in: handler.Invocation{Bundle: bundle}}
	check.Fails(t, c.prepare(), "config.json")
}

func TestOwnersOfAVolumesFiles(t *testing.T) {
	const (
		able   = `echo '{"linux":{"mountExtensions":{"idmap":{"enabled":true}}}}'`
		unable = `echo '{"linux":{"mountExtensions":{"idmap":{"enabled":false}}}}'`
		older  = `echo '{"linux":{"namespaces":["user"]}}'`
	)
	ids := []specs.LinuxIDMapping{{HostID: 200000, Size: 65536}}
	for name, c := range map[string]struct {
		namespace     bool
		uids, gids    []specs.LinuxIDMapping
		runtime, says string
	}{
		"the node's users":      {false, nil, nil, "exit 1", ""},
		"mapped":                {true, ids, ids, able, ""},
		"mapped without users":  {false, ids, ids, able, ""},
		"no mappings":           {true, nil, nil, able, "has no ID mappings"},
		"users alone":           {true, ids, nil, able, "has no ID mappings"},
		"a runc that does not":  {true, ids, ids, unable, "runc 1.2"},
		"a runc of before":      {true, ids, ids, older, "runc 1.2"},
		"a runc without a word": {true, ids, ids, "exit 1", "cannot be told"},
	} {
		t.Run(name, func(t *testing.T) {
			runtime := filepath.Join(t.TempDir(), "runc")
			check.Must(t, os.WriteFile(runtime, []byte("#!/bin/sh\n"+c.runtime+"\n"), 0o700)) //nolint:gosec // it is run
			spec := &specs.Spec{Linux: &specs.Linux{}, Mounts: []specs.Mount{{}, {UIDMappings: c.uids, GIDMappings: c.gids}}}
			if c.namespace {
				spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.UserNamespace}}
			}
			err := checkMounts(runtime, spec, []*oci.Mount{{Index: 1, Destination: "/data"}})
			check.That(t, (err == nil) == (c.says == "") && (err == nil || strings.Contains(err.Error(), c.says)), "it says %v, want %q", err, c.says)
		})
	}
}

func TestOptionsOfAMountAlone(t *testing.T) {
	const spec = `{"mounts":[{"source":"/a"},{"source":"/b<c","options":["rbind","ro"],"later":{"n":1}}],"later":12345678901234567890}`
	got := check.Value(withOptions([]byte(spec), map[int][]string{1: {"rbind", "ro", "nosuid"}}))(t)
	const want = `{"mounts":[{"source":"/a"},{"source":"/b<c","options":["rbind","ro","nosuid"],"later":{"n":1}}],"later":12345678901234567890}`
	var is, wanted any
	check.Must(t, errors.Join(json.Unmarshal(got, &is), json.Unmarshal([]byte(want), &wanted)))
	check.That(t, reflect.DeepEqual(is, wanted), "%s", got)
	for _, other := range []string{`{}`, `{"mounts":[]}`, `{"mounts":`} {
		check.That(t, check.Err(withOptions([]byte(other), map[int][]string{1: nil})) != nil, "%s is taken", other)
	}
}

// TestAgentThatHangs is killed, and another one is started, for which its socket is removed if something in the kernel
// keeps it, as a child does here. Nobody is killed where the agent has no process number.
func TestAgentThatHangs(t *testing.T) {
	const variable, elsewhere = "CRUST_TEST_LISTEN", "CRUST_TEST_ELSEWHERE"
	if dir := os.Getenv(elsewhere); dir != "" {
		check.Must(t, startAgent(Config{StateDir: dir}))
		return
	}
	if path := os.Getenv(variable); path != "" { // it is the agent, which accepts nothing
		listener := check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
		child := exec.Command("sleep", "60")
		child.ExtraFiles = []*os.File{check.Value(listener.File())(t)}
		check.Must(t, child.Start())
		time.Sleep(time.Minute)
	}
	cfg := Config{StateDir: t.TempDir(), AgentProgram: "/no/such/agent"}
	agent := exec.Command(os.Args[0], "-test.run=^TestAgentThatHangs$") //nolint:gosec // this program
	agent.Env = append(os.Environ(), variable+"="+cfg.AgentSocket())
	check.Must(t, agent.Start())
	ended := check.Begin(agent.Wait)
	check.Eventually(t, "it listens", func() bool { served, _ := sys.IsServed(cfg.AgentSocket()); return served })
	if os.Getuid() == 0 {
		other := exec.Command("unshare", "-pf", "sh", "-c", `"$0" "$@"; exit $?`, os.Args[0], "-test.run=^TestAgentThatHangs$") //nolint:gosec // this program
		other.Env, other.SysProcAttr = append(os.Environ(), elsewhere+"="+cfg.StateDir), &syscall.SysProcAttr{Setsid: true}
		check.Must(t, other.Run())
	}
	check.Fails(t, startAgent(cfg), "no agent could be started")
	check.Fails(t, <-ended, "signal: killed")
	check.Is(t, check.Err(os.Stat(cfg.AgentSocket())), os.ErrNotExist)
}
