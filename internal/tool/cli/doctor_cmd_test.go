package cli

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const someConfig = `
runDir: /x/run
kubeletRoot: /x/kubelet
runtimeSocket: {path: /x/runtime.sock, uids: [0]}
handlers: {kata: {directVolumes: /x/kata, goSandboxes: /x/vc}}
containerd: {socket: ""}
cri: {socket: /x/crio.sock}
`

// placesOf reads a configuration with some flags.
func placesOf(t *testing.T, text string, args ...string) doctor.Node {
	t.Helper()
	node := doctor.DefaultNode()
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	placeFlags(flags, &node)
	check.Must(t, flags.Parse(args))
	check.Must(t, readPlaces(text, &node, flags))
	return node
}

func TestPlacesOfTheDaemon(t *testing.T) {
	node := placesOf(t, someConfig, "--kubelet-root", "/y")
	got := strings.Join([]string{node.RunDir, node.KubeletRoot, node.RuntimeSocket, node.KataDir, node.ContainerdSocket}, " ")
	if want := "/x/run /y /x/runtime.sock /x/kata "; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, dir := range []string{"/x/vc", "/run/kata", "/run/vc/sbs"} {
		if !slices.Contains(node.SandboxDirs, dir) {
			t.Errorf("%s is not in %v", dir, node.SandboxDirs)
		}
	}
}

func TestPlacesOfTheClusterAreThoseOfTheFront(t *testing.T) {
	const named = "\ncluster: {kubeconfig: /x/kubelet.conf, nodeName: node-1}\n"
	for config, want := range map[string]string{named: " ", named + "front: {enabled: true}": "/x/kubelet.conf node-1"} {
		node := placesOf(t, config)
		if got := node.Kubeconfig + " " + node.NodeName; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestPlacesAreTheUsualOnesWithoutAConfiguration(t *testing.T) {
	usual := doctor.DefaultNode()
	node := placesOf(t, "keyOfANewerDaemon: 1")
	if node.RunDir != "/run/crust-proxy" || node.RunDir != usual.RunDir || node.ContainerdSocket != usual.ContainerdSocket || node.ContainerdSocket == "" {
		t.Errorf("%+v", node)
	}
	if err := readPlaces("[", &node, pflag.NewFlagSet("", pflag.ContinueOnError)); err == nil {
		t.Error("a broken configuration was taken")
	}
}

func TestDoctorRunsWithAConfigurationItCannotRead(t *testing.T) {
	b := newBench(t)
	b.admin.config = "runDir: [1]"
	r := b.serve().run("doctor")
	if r.code != ExitFindings || !strings.Contains(r.err, "usual places") || !strings.Contains(r.out, "kernel") {
		t.Errorf("%+v", r)
	}
}

func TestDoctorLooksWhereTheDaemonIs(t *testing.T) {
	b := newBench(t)
	b.admin.config = someConfig
	b.serve()
	r := b.run("doctor", "--run-dir", "/flag/run")
	for _, want := range []string{"/x/kubelet", "/x/runtime.sock", "/flag/run", "cannot be reached on /x/crio.sock"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("%q is not in %s", want, r.out)
		}
	}
}

func TestDoctorTellsOfADriverThatIsDown(t *testing.T) {
	b := newBench(t)
	b.admin.started = timestamppb.New(time.Now().Add(time.Hour)) // it stays young
	if r := b.serve().run("doctor", "--quiet"); strings.Contains(r.out, "topolvm.io") || !strings.Contains(r.out, " starting\n") {
		t.Errorf("of a daemon that has just started: %s", r.out)
	}
	b.admin.started = before(time.Hour)
	if r := b.run("doctor"); r.code != ExitFindings || !strings.Contains(r.out, "error drivers           driver topolvm.io has not been ready for ") {
		t.Errorf("%d: %s", r.code, r.out)
	}
}

func TestDoctorWaits(t *testing.T) {
	b := newBench(t).serve()
	if r := b.run("doctor", "--wait", "1200ms"); r.code != ExitFindings || b.admin.asked < 2 || !strings.Contains(r.out, "see: https://github.com/") {
		t.Errorf("asked %d times: %+v", b.admin.asked, r)
	}
	b.admin.asked = 0
	if r := b.run("doctor", "--pre", "--wait", "1h"); r.code != command.ExitOK || b.admin.asked > 0 || !strings.Contains(r.out, "kernel") {
		t.Errorf("before the installation: %+v", r)
	}
}
