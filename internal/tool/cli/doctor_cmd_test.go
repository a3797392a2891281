package cli

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const someConfig = `
runDir: /x/run
kubeletRoot: /x/kubelet
runtimeSocket: {path: /x/runtime.sock}
handlers: {kata: {directVolumes: /x/kata, goSandboxes: /x/vc}}
containerd: {socket: ""}
cri: {socket: /x/crio.sock}
`

func TestPlacesOfTheClusterAreThoseOfTheFront(t *testing.T) {
	const named = "\ncluster: {kubeconfig: /x/kubelet.conf, nodeName: node-1}\n"
	for text, want := range map[string]string{named: " ", named + "front: {enabled: true}": "/x/kubelet.conf node-1"} {
		node := doctor.DefaultNode()
		node.Configure(check.Value(configuration(text+"\nkeyOfANewerDaemon: 1", ""))(t))
		check.Equal(t, node.Config.Cluster.Kubeconfig+" "+node.Config.Cluster.NodeName, want, "kubeconfig and node")
	}
}

func TestDoctorRunsWithAConfigurationItCannotRead(t *testing.T) {
	b := newBench(t)
	b.admin.config = "runDir: [1]"
	r := b.serve().run("doctor")
	check.That(t, r.code == command.ExitFindings && strings.Contains(r.err, "usual places") && strings.Contains(r.out, "kernel"), "%+v", r)
}

// TestDoctorLooksWhereTheDaemonIs, also by its file where it does not answer.
func TestDoctorLooksWhereTheDaemonIs(t *testing.T) {
	looks := func(b *bench) {
		t.Helper()
		r := b.run("doctor")
		for _, want := range []string{"/x/kubelet", "/x/runtime.sock", "/x/run", "cannot be reached on /x/crio.sock"} {
			check.That(t, strings.Contains(r.out, want) && r.err == "", "%q is not in %+v", want, r)
		}
	}
	b := newBench(t)
	b.admin.config = someConfig
	looks(b.serve())
	b = newBench(t)
	check.Must(t, os.MkdirAll(b.node.Root+"/etc/crust-proxy", 0o755))
	check.Must(t, os.WriteFile(b.node.Root+usualConfig, []byte(someConfig), 0o600))
	looks(b)
	r := b.run("doctor", "--config", "/nowhere")
	check.That(t, strings.Contains(r.err, "/nowhere: no such file"), "%+v", r)
}

func TestDoctorWaits(t *testing.T) {
	b := newBench(t).serve()
	r := b.run("doctor", "--wait", "1200ms")
	check.That(t, r.code == command.ExitFindings && b.admin.asked >= 2 && strings.Contains(r.out, "see: https://github.com/"),
		"asked %d times: %+v", b.admin.asked, r)
	b.admin.asked = 0
	r = b.run("doctor", "--pre", "--wait", "1h")
	check.That(t, r.code == command.ExitOK && b.admin.asked == 0 && strings.Contains(r.out, "kernel"), "before the installation: %+v", r)
}
