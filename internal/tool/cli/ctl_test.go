package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		check.Must(t, os.WriteFile(file, []byte(got), 0o600))
	}
	want := check.Value(os.ReadFile(file))(t) // #nosec G304 -- a path of the test
	check.Same(t, cmp.Diff(string(want), got), "%s (-want +got)", name)
}

func TestGoldenOutput(t *testing.T) {
	repairs := []*adminv1.Repair{{VolumeId: idA, Action: "remade the guard"}, {VolumeId: idB, Action: "projected", Error: "no space left"}}
	cases := []struct {
		file string
		args string
		code int
	}{
		{"list.txt", "list", command.ExitOK},
		{"list-wide.txt", "ls -o wide", command.ExitOK},
		{"list.json", "list -o json", command.ExitOK},
		{"list.yaml", "list -o yaml --driver ebs.csi.aws.com", command.ExitOK},
		{"get.txt", "get " + idA, command.ExitOK},
		{"get-degraded.txt", "get cc11bb", command.ExitOK},
		{"get.json", "get aa11bb -o json", command.ExitOK},
		{"stats.txt", "stats aa11bb", command.ExitOK},
		{"stats.json", "stats aa11bb -o json", command.ExitOK},
		{"expand.txt", "expand aa11bb --size 20Gi", command.ExitOK},
		{"expand.json", "expand aa11bb -o json", command.ExitOK},
		{"handlers.txt", "handlers", command.ExitOK},
		{"explain.txt", "explain shop/web-0", command.ExitOK},
		{"explain.json", "explain shop/web-0 -o json", command.ExitOK},
		{"handlers.yaml", "handlers -o yaml", command.ExitOK},
		{"drivers.txt", "drivers", command.ExitOK},
		{"drivers-wide.txt", "drivers -o wide", command.ExitOK},
		{"drivers.json", "drivers -o json", command.ExitOK},
		{"drivers.yaml", "drivers -o yaml", command.ExitOK},
		{"reconcile.txt", "reconcile", command.ExitFailure},
		{"reconcile.json", "reconcile -o json", command.ExitFailure},
	}
	for _, c := range cases {
		t.Run(c.file, func(t *testing.T) {
			b := newBench(t).serve()
			b.admin.repairs = repairs
			got := b.run(append(strings.Fields(c.args), "--socket", b.socket)...)
			check.Require(t, got.code == c.code, "exit code %d, want %d: %s", got.code, c.code, got.err)
			golden(t, c.file, got.out)
		})
	}
}

func TestListGoesThroughAllPagesAndFilters(t *testing.T) {
	b := newBench(t).serve()
	var got struct {
		Volumes []struct{ ID, State string }
	}
	for args, want := range map[string][]string{
		"list -o json":                                  {idB, idC, idA}, // by pod
		"list -o json --driver lvm":                     {idB, idC},
		"list -o json --handler kata --state degraded":  {idC},
		"list -o json --state BOUND":                    {idA},
		"list -o json --driver nobody":                  {},
		"list -o json --handler crust --driver lvm":     {idB},
		"list -o json --handler crust --state removing": {},
		"list -o json --state bound,degraded":           {idC, idA},
		"list -o json --state bound --state degraded":   {idC, idA},
		"list -o json -n shop":                          {idA},
		"list -o json -n shop,evil --driver lvm":        {idC},
		"list -o json --pod web-0":                      {idA},
		"ls -o json --pod shop/web-0,b1b2b3b4-2222":     {idB, idA},
	} {
		r := b.run(strings.Fields(args)...)
		err := json.Unmarshal([]byte(r.out), &got)
		check.Require(t, err == nil, "%s: %v in %s %s", args, err, r.out, r.err)
		ids := []string{}
		for _, v := range got.Volumes {
			ids = append(ids, v.ID)
		}
		check.Same(t, cmp.Diff(want, ids), "%s", args)
	}
}

func TestOutputForPrograms(t *testing.T) {
	b := newBench(t).serve()
	for args, want := range map[string]string{
		"list -o name": idB + "\n" + idC + "\n" + idA + "\n", "get web-0 -o name": idA + "\n", "list -o name --pod nobody": "",
		"handlers -o name": "crust\nkata\n", "drivers -o name": "ebs.csi.aws.com\ntopolvm.io\n",
		"get web-0 -o jsonpath={.device}": "/dev/nvme1n1\n", "get web-0 -o jsonpath=.device": "/dev/nvme1n1\n", "get web-0 -o jsonpath=device": "/dev/nvme1n1\n",
		`list -o jsonpath={range.volumes[*]}{.id}{"\t"}{.podName}{"\n"}{end}`: idB + "\t\n" + idC + "\tc\\x1b[2J\n" + idA + "\tweb-0\n",
		`list -o jsonpath={.volumes[?(@.readOnly==true)].device}`:             "/dev/vg/b\n",
		"get web-0 -o jsonpath={.nothing}":                                    "",
		"list -o go-template={{range.volumes}}{{.podName}},{{end}}":           ",c\\x1b[2J,web-0,\n",
		"handlers -o go-template={{range.handlers}}{{.volumes}};{{end}}":      "0;2;\n",
		"version -o jsonpath={.daemon}":                                       sys.Version() + "\n",
	} {
		r := b.run(strings.Fields(args)...)
		check.That(t, r.code == command.ExitOK && r.out == want, "%s: got %q, want %q; %s", args, r.out, want, r.err)
	}
	for _, args := range []string{"list -o jsonpath={.x", "list -o go-template={{.x", "stats web-0 -o name", "version -o name", "release web-0 -o name"} {
		r := b.run(strings.Fields(args)...)
		check.That(t, r.code == command.ExitUsage && b.admin.released == nil, "%s: %+v", args, r)
	}
}

// TestSeveralVolumesOfAName: they are listed, and nothing is done to any.
func TestSeveralVolumesOfAName(t *testing.T) {
	for _, args := range []string{"get", "stats", "expand", "freeze", "thaw", "release", "release --force --yes", "end --yes"} {
		b := newBench(t).serve()
		r := b.run(append(strings.Fields(args), "twice")...)
		check.That(t, r.code == command.ExitUsage && strings.Contains(r.err, "2 volumes:\naa11bb22cc33  pod shop/web-0\nbb11bb22cc33  \\x1b[2J\n"),
			"%s: %+v", args, r)
		check.That(t, b.admin.released == nil && b.admin.ended == nil && b.admin.frozen == nil && b.admin.expanded == nil, "%s was done", args)
	}
}

func TestYAMLIsTheSameAsJSON(t *testing.T) {
	b := newBench(t).serve()
	for _, args := range []string{"list", "get aa11bb", "get cc11bb", "stats aa11bb", "handlers", "drivers", "reconcile", "doctor", "version"} {
		asJSON := b.run(append(strings.Fields(args), "-o", "json")...).out
		asYAML := b.run(append(strings.Fields(args), "-o", "yaml")...).out
		converted, err := yaml.YAMLToJSON([]byte(asYAML))
		check.Require(t, err == nil, "%s: %v", args, err)
		var x, y any
		err = errors.Join(json.Unmarshal([]byte(asJSON), &x), json.Unmarshal(converted, &y))
		check.Require(t, err == nil, "%s: %v", args, err)
		check.Same(t, cmp.Diff(x, y), "%s", args)
	}
}

func TestExpandSendsSizes(t *testing.T) {
	b := newBench(t).serve()
	r := b.run("expand", "aa11bb", "--size", "20Gi", "--limit", "1.5Ti")
	check.Require(t, r.code == command.ExitOK, "%s", r.err)
	check.That(t, b.admin.expanded.RequiredBytes == 20<<30 && b.admin.expanded.LimitBytes == 3<<39, "sent %v", b.admin.expanded)
	b.admin.later = true
	r = b.run("expand", "aa11bb")
	check.That(t, strings.Contains(r.out, "No sandbox has volume data of pod shop/web-0 (aa11bb22cc33): the next one grows"), "got %+v", r)
}

func TestFreezeSendsATime(t *testing.T) {
	b := newBench(t).serve()
	r := b.run("freeze", "aa11bb", "--for", "90s")
	check.That(t, r.code == command.ExitOK && strings.Contains(r.out, "1m30s") && b.admin.frozen.GetTimeout().GetSeconds() == 90,
		"%+v, sent %v", r, b.admin.frozen)
	r = b.run("thaw", "aa11bb")
	check.That(t, r.code == command.ExitOK && strings.Contains(r.out, "Writes to volume data of pod shop/web-0 (aa11bb22cc33) go on"), "got %+v", r)
	for _, wrong := range []string{"0", "1500ms", "-1s"} {
		r = b.run("freeze", "aa11bb", "--for", wrong)
		check.That(t, r.code == command.ExitUsage, "--for %s: %+v", wrong, r)
	}
}

func TestReleaseForcesOnlyWhenTold(t *testing.T) {
	b := newBench(t).serve()
	r := b.run("release", idA)
	check.That(t, r.code == command.ExitOK && r.out == "Released: volume data of pod shop/web-0 (aa11bb22cc33).\n" &&
		b.admin.released.GetVolume() == idA && !b.admin.released.GetForce(), "%+v, sent %v", r, b.admin.released)
	b.admin.heldBy, b.admin.released = `process 4711 ("qemu")`, nil
	r = b.run("release", idA, "--force") // there is no terminal to ask at
	check.That(t, r.code == command.ExitUsage && strings.Contains(r.err, "volume data of pod shop/web-0") && strings.Contains(r.err, "sandbox 5a5a") && b.admin.released == nil,
		"%+v, sent %v", r, b.admin.released)
	r = b.run("release", idA, "--force", "--yes")
	check.That(t, r.code == command.ExitOK && strings.Contains(r.out, "4711") && b.admin.released.GetForce(), "%+v, sent %v", r, b.admin.released)
	check.Equal(t, b.run("release").code, command.ExitUsage, "no volume")
	both := &adminv1.Volume{Sandbox: &adminv1.Sandbox{Id: "5a5a"}, HeldBy: "process 4711"}
	check.Says(t, "the prompt", describeUsers(both), "sandbox 5a5a has it", "open in process 4711", "was not asked now")
}

func TestPublishAndUnpublish(t *testing.T) {
	b := newBench(t).serve()
	b.node.Config.RuntimeSocket.Path, b.env[socketVariable] = b.socket, "/nonexistent"
	r := b.run("publish", "/dev/x", "/k/mount", "--fs", "xfs", "--options", "noatime,nosuid", "--read-only")
	want := &runtimev1.RuntimeStageVolumeRequest{
		VolumeType: &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK}, VolumeBackingPath: "/dev/x", VolumeTargetPath: "/k/mount",
		FsType: "xfs", MountFlags: []string{"noatime", "nosuid", "ro"},
	}
	check.That(t, r.code == command.ExitOK && strings.Contains(r.out, "Published /dev/x at /k/mount") && proto.Equal(b.admin.runtime.asked, want),
		"%+v, sent %v", r, b.admin.runtime.asked)
	r = b.run("unpublish", "/k/mount", "-o", "json")
	check.That(t, r.out == "{}\n" && proto.Equal(b.admin.runtime.asked, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: "/k/mount"}),
		"%+v, sent %v", r, b.admin.runtime.asked)
	b.admin.runtime.fail = status.Error(codes.PermissionDenied, "uid 7 may not")
	for args, says := range map[string]string{
		"unpublish /k": "authorization.runtime.uids", "unpublish /k --runtime-socket /nonexistent": "Give --runtime-socket.",
		"publish /dev/x /k": "needs --fs", "publish /dev/x --fs xfs": "needs a TARGET",
	} {
		r = b.run(strings.Fields(args)...)
		check.That(t, r.code != command.ExitOK && strings.Contains(r.err, says), "%s: %+v", args, r)
	}
}

// An orphan is ended only if a person agrees.
func TestEndAsks(t *testing.T) {
	b := newBench(t).serve()
	for answer, ended := range map[string]bool{"y\n": true, "n\n": false, "": false} {
		keys, answers, err := os.Pipe()
		check.Must(t, err)
		check.Must(t, errors.Join(check.Err(answers.WriteString(answer)), answers.Close()))
		b.keys, b.admin.ended = keys, nil
		r := b.run("end", "aa11bb")
		check.That(t, (r.code == command.ExitOK) == ended && slices.Equal(b.admin.ended, []int32{4711}) == ended && strings.Contains(r.err, `process 4711 ("qemu"), control group /kata/5a`) && strings.Contains(r.err, "volume data of pod shop/web-0"),
			"answer %q: %+v, ended %v", answer, r, b.admin.ended)
		_ = keys.Close()
	}
}

// TestBareNames: anybody may call a pod like another's volume, so release and end do nothing by such a name unless a
// person has seen which volume it is.
func TestBareNames(t *testing.T) {
	b := newBench(t).serve()
	for _, name := range []string{"aa11bb", idA[:12], "web-0", "data", "vol-0a1b", "0f0e0d0c-1111"} {
		for _, args := range []string{"release", "release --yes", "release --force", "release --force --yes", "end", "end --yes"} {
			b.admin.released, b.admin.ended = nil, nil
			r := b.run(append(strings.Fields(args), name)...)
			check.That(t, r.code == command.ExitUsage && strings.Contains(r.err, "the whole id") && strings.Contains(r.err, idA) && b.admin.released == nil && b.admin.ended == nil,
				"%s %s: %+v, sent %v, %v", args, name, r, b.admin.released, b.admin.ended)
		}
	}
	for _, name := range []string{idA, "/var/lib/kubelet/pods/a/mount", "shop/web-0", "shop/data"} {
		b.admin.released, b.admin.ended = nil, nil
		b.run("release", name)
		b.run("end", name, "--yes")
		check.That(t, b.admin.released.GetVolume() == idA && len(b.admin.ended) != 0, "%s: sent %v, %v", name, b.admin.released, b.admin.ended)
	}
	for answer, released := range map[string]bool{"y\n": true, "n\n": false} {
		keys, answers, err := os.Pipe()
		check.Must(t, err)
		check.Must(t, errors.Join(check.Err(answers.WriteString(answer)), answers.Close()))
		b.keys, b.admin.released = keys, nil
		r := b.run("release", "web-0")
		check.That(t, (b.admin.released != nil) == released && strings.Contains(r.err, "volume data of pod shop/web-0 ("+idA+"), device /dev/nvme1n1, target /var"),
			"answer %q: %+v, sent %v", answer, r, b.admin.released)
		_ = keys.Close()
	}
}

func inPod(b *bench) { b.node.Service = doctor.Service{InPod: true, Namespace: "ns", Pod: "p"} }

func TestExitCodesAndErrors(t *testing.T) {
	cases := []struct {
		name string
		set  func(*bench)
		args string
		code int
		says []string
	}{
		{"not running", nil, "list", command.ExitFailure, []string{"not running", "systemctl status crust-proxy", "--socket"}},
		{"nobody listens", func(b *bench) { b.deadSocket() }, "list", command.ExitFailure, []string{"nobody listens", "systemctl status crust-proxy"}},
		{"not running, in a pod", inPod, "list", command.ExitFailure, []string{"not running", "kubectl -n ns describe pod p"}},
		{"nobody listens, in a pod", func(b *bench) { inPod(b); b.deadSocket() }, "list", command.ExitFailure, []string{"describe pod p", "kubectl -n ns logs p"}},
		{"no such volume", serve, "get 123456", command.ExitFailure, []string{`no volume "123456"`, "NotFound"}},
		{"daemon refuses", failing(codes.PermissionDenied, "uid 7 may not"), "list", command.ExitFailure, []string{"uid 7 may not", "sudo", "authorization.admin.uids"}},
		{"daemon stops", failing(codes.Unavailable, "draining"), "list", command.ExitFailure, []string{"draining", "again"}},
		{"no sandbox", failing(codes.Unavailable, "volume /v: no sandbox has mounted it now"), "stats aa11bb", command.ExitFailure, []string{"while its pod runs", "crustctl get"}},
		{"no socket", nil, "list --socket /etc/passwd", command.ExitFailure, []string{"/etc/passwd is not a socket", "--socket"}},
		{"connection closed at once", func(b *bench) { b.closing() }, "list", command.ExitFailure, []string{"authorization.admin.uids", "sudo"}},
		{"another socket", failing(codes.Unimplemented, "unknown service crust.admin.v1.Admin"), "drivers", command.ExitFailure, []string{"the daemon's admin socket?"}},
		{"what is asked is refused", failing(codes.PermissionDenied, "/x lies below no root"), "reconcile", command.ExitFailure, []string{"no root (PermissionDenied)"}},
		{"older daemon", failing(codes.Unimplemented, "unknown method"), "reconcile", command.ExitFailure, []string{"older than crustctl"}},
		{"a runtime that cannot", failing(codes.Unimplemented, "volume /v: the handler cannot grow it"), "expand aa11bb", command.ExitFailure, []string{"cannot grow it (Unimplemented)"}},
		{"hangs", func(b *bench) { b.admin.hang = true; b.serve() }, "stats aa11bb --timeout 2s", command.ExitFailure, []string{"no answer in time", "--timeout"}},
		{"watch cut", func(b *bench) { b.admin.endWatch = true; b.serve() }, "watch", command.ExitFailure, []string{"ended the watch"}},
		{"watch refused", failing(codes.PermissionDenied, "uid 7"), "watch", command.ExitFailure, []string{"sudo"}},
		{"version, daemon down", nil, "version", command.ExitFailure, []string{"not running"}},
		{"own version only", nil, "version --client", command.ExitOK, nil},
		{"unknown command", nil, "lsit", command.ExitUsage, []string{`no command "lsit"`, "did you mean list", "crustctl --help"}},
		{"the daemon's command", nil, "removable-nodes", command.ExitUsage, []string{"did you mean", "crust-proxy removable-nodes", "crustctl --help"}},
		{"the daemon's command, mistyped", nil, "valdate", command.ExitUsage, []string{"did you mean crust-proxy validate?"}},
		{"a command of crust-backup", nil, "backup tuesday --file x", command.ExitUsage, []string{"did you mean crust-backup backup?"}},
		{"unknown flag", nil, "list --nope", command.ExitUsage, []string{"--nope", "crustctl list --help"}},
		{"bad format", nil, "list -o xml", command.ExitUsage, []string{`"xml"`}},
		{"bad state", nil, "list --state great", command.ExitUsage, []string{"bound", "degraded"}},
		{"no state", nil, "list --state held,", command.ExitUsage, []string{"bound", "degraded"}},
		{"bad size", nil, "expand aa11bb --size lots", command.ExitUsage, []string{"20Gi"}},
		{"limit below size", nil, "expand aa11bb --size 2Gi --limit 1Gi", command.ExitUsage, []string{"--limit"}},
		{"no volume", nil, "stats", command.ExitUsage, []string{"needs a VOLUME"}},
		{"two volumes", nil, "stats a b", command.ExitUsage, []string{`"b"`}},
		{"no such configuration", nil, "doctor --wait 1h --config /nope", command.ExitFailure, []string{"/nope: "}},
		{"negative timeout", nil, "list --timeout -1s", command.ExitUsage, []string{"negative"}},
		{"abstract socket", nil, "list --socket @x", command.ExitUsage, []string{"abstract"}},
		{"completion of nothing", nil, "completion tcsh", command.ExitUsage, []string{"tcsh"}},
		{"completion", nil, "completion bash", command.ExitOK, nil},
		{"help", nil, "list --help", command.ExitOK, nil},
		{"help of a command", nil, "help list", command.ExitOK, nil},
		{"help of no command", nil, "help lsit", command.ExitUsage, []string{`no command "lsit"`, "did you mean list"}},
		{"bare", nil, "", command.ExitOK, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			if c.set != nil {
				c.set(b)
			}
			r := b.run(strings.Fields(c.args)...)
			check.That(t, r.code == c.code, "exit code %d, want %d (%s)", r.code, c.code, r.err)
			check.Says(t, "the error", r.err, c.says...)
		})
	}
}

func TestVersionSaysThatMetricsAreNotServed(t *testing.T) {
	b := newBench(t).serve()
	b.admin.httpProblem = "the address 192.0.2.1:9814 cannot be used"
	r := b.run("version")
	check.That(t, strings.Contains(r.out, b.admin.httpProblem), "%+v", r)
}

func serve(b *bench) { b.serve() }

func failing(code codes.Code, text string) func(*bench) {
	return func(b *bench) {
		b.admin.fail = status.Error(code, text)
		b.serve()
	}
}

// deadSocket leaves the file of a socket that nobody serves any more.
func (b *bench) deadSocket() {
	b.serve()
	check.Must(b.t, os.Rename(b.socket, b.socket+".x"))
	l := listenRaw(b.t, b.socket)
	check.Must(b.t, l.Close())
}

// closing is a daemon that closes each connection before it says a word, as one
// does to a peer that its credentials shut out.
func (b *bench) closing() {
	l := listenRaw(b.t, b.socket)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	b.t.Cleanup(func() { _ = l.Close(); <-done })
}

func TestSocketOfTheEnvironment(t *testing.T) {
	b := newBench(t).serve()
	b.env[socketVariable] = "unix://" + b.socket
	b.node.AdminSocket = "/nonexistent/admin.sock"
	check.Equal(t, b.run("list").code, command.ExitOK, "exit code")
	r := b.run("list", "--socket", "/nonexistent/other.sock")
	check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, "other.sock"), "the flag goes before the environment: %+v", r)
}

func TestWatchEndsWellWhenInterrupted(t *testing.T) {
	b := newBench(t).serve()
	for range 5 {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(30*time.Millisecond, cancel)
		r, timed := b.runContext(ctx, "watch"), b.run("watch", "--timeout", "30ms")
		check.That(t, r.code == command.ExitOK && timed.code == command.ExitOK, "%+v; by --timeout %+v", r, timed)
		cancel()
	}
}

func TestUntrustedTextNeverReachesTheTerminal(t *testing.T) {
	b := newBench(t)
	b.admin.findings, b.admin.endWatch = []string{"finding \x1b[2J\u202e"}, true
	b.serve()
	commands := []string{"list", "list -o wide", "list -o json", "list -o yaml", "get cc11bb", "get cc11bb -o json", "get cc11bb -o yaml",
		"stats cc11bb", "stats cc11bb -o yaml", "explain x", "explain x -o yaml", "handlers", "drivers", "drivers -o wide", "drivers -o json", "drivers -o yaml", "doctor", "doctor -o json", "doctor -o yaml",
		"watch", "watch -o json", "watch -o yaml", "reconcile"}
	for _, args := range commands {
		r := b.run(strings.Fields(args)...)
		harmful := strings.IndexFunc(r.out+r.err, func(c rune) bool { return c != '\n' && show.Unsafe(c) })
		check.That(t, harmful < 0, "%s prints at %d something harmful: %q", args, harmful, r.out+r.err)
		check.That(t, !strings.Contains(r.out, "\nEVENT fake"), "%s: a guest's text began a row", args)
	}
	b.admin.fail = status.Error(codes.Internal, "bad\x1b[2J\nEVENT fake \u202e")
	r := b.run("list")
	check.That(t, !strings.ContainsAny(r.err, "\x1b\u202e") && !strings.Contains(r.err, "\nEVENT"), "error %q", r.err)
}

func TestDoctorExitCodes(t *testing.T) {
	b := newBench(t).serve()
	r := b.run("doctor", "-o", "json")
	check.That(t, r.code == command.ExitFindings && r.err == "", "code %d, %q", r.code, r.err)
	var report struct {
		Findings []struct{ Check, Severity, Seen, Do string }
	}
	err := json.Unmarshal([]byte(r.out), &report)
	check.Require(t, err == nil && len(report.Findings) >= 10, "%v in %s", err, r.out)
	first := report.Findings[0]
	check.That(t, first.Check == "daemon" && first.Severity == "ok" && strings.Contains(first.Seen, sys.Version()), "got %+v", first)
}

func TestFailureToWriteIsAFailure(t *testing.T) {
	b := newBench(t).serve()
	for _, args := range []string{"list", "list -o json", "watch", "get aa11bb", "doctor", "explain x", "handlers", "drivers", "stats aa11bb", "version"} {
		code := Run(t.Context(), strings.Fields(args), Env{Out: fullDisk{}, Err: io.Discard, Node: b.node,
			Getenv: func(string) string { return "" }, Now: time.Now})
		check.That(t, code == command.ExitFailure, "%s: code %d", args, code)
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, os.ErrClosed }

func listenRaw(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l := check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	return l
}

func offers(t *testing.T, b *bench, args ...string) []string {
	t.Helper()
	r := b.run(append([]string{"__complete"}, args...)...)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	check.Require(t, r.code == command.ExitOK && lines[len(lines)-1] == ":4", "%+v", r)
	return lines[:len(lines)-1]
}

func TestCompletion(t *testing.T) {
	b := newBench(t)
	b.admin.volumes = append(b.admin.volumes, &adminv1.Volume{Id: strings.Repeat("d", 64), TargetPath: "/x", Driver: "a\nrm -rf"}) // this driver is never offered
	b.serve()
	for args, want := range map[string]string{
		"get ":                     "b1b2b3b4-2222\tb1b2b3b4 b PUBLISHED dddddddddddd\tx shop/web-0\tshop/web-0 data BOUND",
		"stats aa":                 "aa11bb22cc33\tshop/web-0 data BOUND",
		"release shop/":            "shop/data\tshop/web-0 data BOUND shop/web-0\tshop/web-0 data BOUND",
		"expand /var/lib/kubelet/": "/var/lib/kubelet/pods/a/mount\tshop/web-0 data BOUND /var/lib/kubelet/pods/b/mount\tb1b2b3b4 b PUBLISHED",
		"list -n ":                 "evil shop", "list --pod s": "shop/web-0",
		"get aa11bb22cc33 ": "",
		"list --driver ":    "ebs.csi.aws.com lvm",
		"watch --handler k": "kata",
		"list --state re":   "published bound degraded removing adopted refused held",
		"top --handler ":    "crust kata", "top --sort ": "usage latency age state name", "top --driver l": "lvm",
		"list -o ": "table wide name json yaml jsonpath= go-template=",
	} {
		check.Equal(t, strings.Join(offers(t, b, strings.Split(args, " ")...), " "), want, "%s", args)
	}
}

// refusedVolume is one whose pod waits. What it repeats was written by others.
func refusedVolume() *adminv1.Volume {
	return &adminv1.Volume{
		Id: strings.Repeat("dd", 32), TargetPath: "/var/lib/kubelet/pods/d/mount", State: adminv1.VolumeState_VOLUME_STATE_REFUSED,
		Driver: "lvm", Handler: "kata", FsType: "xfs", VolumeId: "vol-d", AccessMode: "SINGLE_NODE_WRITER", Rule: `rule "who asks"`,
		PodUid: "0d0d", PodNamespace: "team", PodName: "db-0", RefusedBy: "handler", Refusals: 7,
		CreatedAt: before(3 * time.Minute), LastErrorAt: before(30 * time.Second),
		LastError: "volume /var/lib/kubelet/pods/d/mount of pod team/db-0: a container mounts its sub-directory \"logs\x1b[2J\" by subPath",
	}
}

func TestRefusedVolumesAreShown(t *testing.T) {
	b := newBench(t)
	b.admin.volumes = append(b.admin.volumes, refusedVolume())
	b.serve()
	golden(t, "get-refused.txt", b.run("get", "/var/lib/kubelet/pods/d/mount").out)
	golden(t, "list-refused.txt", b.run("list", "--state", "refused").out)
	golden(t, "list-refused-wide.txt", b.run("list", "--state", "refused", "-o", "wide").out)
	all := b.run("get")
	check.That(t, all.out == b.run("list").out && strings.Contains(all.out, "REFUSED (handler)"), "get without a volume shows %s %s", all.out, all.err)
	got := b.run("get", "dddddd", "-o", "json").out
	check.That(t, strings.Contains(got, `"refusedBy": "handler"`) && strings.Contains(got, `"podName": "db-0"`), "JSON: %s", got)
	check.Says(t, "doctor", b.run("doctor", "--quiet").out, "refused by the handler: volume /var/lib/kubelet/pods/d/mount of pod team/db-0")
	b = newBench(t)
	b.admin.volumes[0], b.admin.endWatch = refusedVolume(), true
	b.serve()
	got = b.run("watch").out
	check.That(t, strings.Contains(got, "REFUSED (handler)") && !strings.Contains(got, "\x1b"), "watch: %q", got)
}

func TestColourIsForWillingTerminalsOnly(t *testing.T) {
	b := newBench(t).serve()
	for name, c := range map[string]struct {
		tty  bool
		env  map[string]string
		want bool
	}{
		"terminal":      {true, nil, true},
		"pipe":          {false, nil, false},
		"NO_COLOR":      {true, map[string]string{"NO_COLOR": "1"}, false},
		"dumb terminal": {true, map[string]string{"TERM": "dumb"}, false},
	} {
		b.tty, b.env = c.tty, c.env
		out := b.run("list").out
		check.Equal(t, strings.Contains(out, "\x1b["), c.want, "%s: coloured", name)
		if c.want {
			golden(t, "list-colour.txt", out)
		}
	}
}

func TestNothingToShow(t *testing.T) {
	b := newBench(t).serve()
	for args, want := range map[string]string{
		"list --driver nobody": "No volumes.\n", "reconcile": "3 volumes checked, nothing to repair.\n", "__complete list --driver x": ":4\n",
	} {
		r := b.run(strings.Fields(args)...)
		check.That(t, r.code == command.ExitOK && r.out == want, "%s: %+v", args, r)
	}
	b.admin.drivers = nil
	r := b.run("drivers")
	check.That(t, strings.HasPrefix(r.out, "No driver has registered"), "got %+v", r)
	b.admin.frontOff = true
	r = b.run("drivers")
	check.That(t, strings.Contains(r.out, "The CSI front is off") && strings.Contains(r.out, "front.enabled"), "got %+v", r)
	got := offers(t, newBench(t), "get", "")
	check.That(t, len(got) == 0, "without a daemon %q is offered", got)
}

// getShows are changes of a volume, and what get shows of them.
func getShows(t *testing.T, change func(*adminv1.Volume), want, never string) {
	t.Helper()
	b := newBench(t).serve()
	got := b.run("get", idA).out
	check.That(t, want == "" || !strings.Contains(got, want), "without the change it is shown too:\n%s", got)
	change(b.admin.volumes[0])
	got = b.run("get", idA).out
	check.That(t, strings.Contains(got, want) && !strings.Contains(got, never), "no %q, or %q, in:\n%s", want, never, got)
}

// TestGetShows: a growth that waits for another pod, a freeze, and below the pod's group that it has no effect.
func TestGetShows(t *testing.T) {
	getShows(t, func(v *adminv1.Volume) { v.GrowWaits = "it grows when the pod is deleted" }, "20GiB (waits: it grows when the pod is deleted)", "next mount")
	getShows(t, func(v *adminv1.Volume) { v.FrozenSince = before(30 * time.Second) }, "for 30s so far; crustctl thaw", "\x1b")
	getShows(t, func(v *adminv1.Volume) { v.GroupProblem = "fsGroup is ignored\x1b[2J" },
		"Group:         2000 (OnRootMismatch)\n-              fsGroup is ignored", "\x1b[2J")
}

// Numbers that a sandbox did not confirm when it was asked last are not shown as if they were true now.
func TestStaleUsage(t *testing.T) {
	getShows(t, func(v *adminv1.Volume) { v.StatsAt = before(time.Second) }, "not again since", "no usage")
	b := newBench(t).serve()
	b.admin.volumes[0].StatsAt = before(72 * time.Hour) // or the clock went back
	got := b.run("list")
	check.That(t, !strings.Contains(got.out, "2.5Gi"), "stale numbers are shown:\n%s", got.out)
}

func TestWatchFormats(t *testing.T) {
	b := newBench(t).serve()
	b.admin.endWatch = true // after all that it has to print
	template := b.run("watch", "--handler", "crust", "-o", "jsonpath={.type}:{.volume.device}").out
	check.Equal(t, template, "TYPE_CHANGED:/dev/vg/b\nTYPE_SYNCED:\n", "a template")
	for format, file := range map[string]string{"table": "watch.txt", "json": "watch.json", "yaml": ""} {
		r := b.run("list", "-w", "--handler", "kata", "-o", format)
		check.Require(t, r.code == command.ExitFailure && r.out == b.run("watch", "--handler", "kata", "-o", format).out, "%+v", r)
		if file != "" {
			golden(t, file, r.out)
		} else if n := strings.Count(r.out, "---\n"); n != 4 {
			t.Errorf("%d documents", n)
		}
	}
}

func TestDoctorWithTheDaemonDown(t *testing.T) {
	r := newBench(t).run("doctor")
	check.That(t, r.code == command.ExitFindings && strings.Contains(r.out, "systemctl status crust-proxy") && strings.Contains(r.out, "kernel"),
		"%d: %s %s", r.code, r.out, r.err)
	b := newBench(t)
	b.admin.hang = true
	r = b.serve().run("doctor", "--timeout", "2s", "--quiet")
	check.That(t, r.code == command.ExitFindings && strings.Contains(r.out, "no answer in time") && !strings.Contains(r.out, "\nok "),
		"of a hung daemon: %d: %s", r.code, r.out)
}
