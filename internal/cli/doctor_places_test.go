package cli

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/doctor"
)

const someConfig = `
runDir: /x/run
kubeletRoot: /x/kubelet
runtimeSocket: {path: /x/runtime.sock, uids: [0]}
handlers: {kata: {directVolumes: /x/kata, goSandboxes: /x/vc}}
containerd: {socket: ""}
cri: {socket: /x/crio.sock}
front: {registry: /x/kubelet/ours, kubeletRegistry: /x/kubelet/theirs}
`

func TestPlacesOfTheDaemon(t *testing.T) {
	node := doctor.DefaultNode()
	given := func(flag string) bool { return flag == "kubelet-root" }
	if err := readPlaces(someConfig, &node, given); err != nil {
		t.Fatal(err)
	}
	got := strings.Join([]string{node.RunDir, node.KubeletRoot, node.RuntimeSocket, node.KataDir, node.ContainerdSocket,
		node.SandboxDirs[len(node.SandboxDirs)-1]}, " ")
	if want := "/x/run /var/lib/kubelet /x/runtime.sock /x/kata  /x/vc"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestPlacesOfRegistrationsGoWithTheKubeletRoot(t *testing.T) {
	for given, want := range map[bool]string{true: " ", false: "/x/kubelet/theirs /x/kubelet/ours"} {
		node := doctor.DefaultNode()
		if err := readPlaces(someConfig, &node, func(flag string) bool { return given && flag == "kubelet-root" }); err != nil {
			t.Fatal(err)
		}
		if got := node.KubeletRegistry + " " + node.FrontRegistry; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestPlacesOfTheClusterAreThoseOfTheFront(t *testing.T) {
	const named = "\ncluster: {kubeconfig: /x/kubelet.conf, nodeName: node-1}\n"
	for config, want := range map[string]string{named: " ", named + "front: {enabled: true}": "/x/kubelet.conf node-1"} {
		node := doctor.DefaultNode()
		if err := readPlaces(config, &node, func(string) bool { return false }); err != nil {
			t.Fatal(err)
		}
		if got := node.Kubeconfig + " " + node.NodeName; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestPlacesAreTheUsualOnesWithoutAConfiguration(t *testing.T) {
	node := doctor.DefaultNode()
	if err := readPlaces("", &node, func(string) bool { return false }); err != nil || node.RunDir != doctor.DefaultNode().RunDir ||
		node.ContainerdSocket != doctor.DefaultNode().ContainerdSocket {
		t.Errorf("%v: %+v", err, node)
	}
	if err := readPlaces("[", &node, func(string) bool { return false }); err == nil {
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
	for _, want := range []string{"/x/kubelet", "/x/runtime.sock", "/flag/run", "containerd is not used", "cannot be reached on /x/crio.sock"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("%q is not in %s", want, r.out)
		}
	}
}
