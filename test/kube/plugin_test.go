//go:build system

package kube_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// plugin is kubectl crust, as kubectl finds it.
type plugin struct {
	k   *cluster.Kube
	dir string
}

// run returns what is printed, with the error if there is one.
func (p *plugin) run(args ...string) string {
	cmd := exec.Command(filepath.Join(p.dir, "kubectl-crust"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+p.k.AdminKubeconfig)
	out, err := cmd.CombinedOutput()
	return fmt.Sprint(string(out), err)
}

func (p *plugin) wants(args string, words ...string) string {
	p.k.T.Helper()
	out := p.run(strings.Fields(args)...)
	squeezed := strings.Join(strings.Fields(out), " ")
	check.Says(p.k.T, "kubectl crust "+args, squeezed, words...)
	return out
}

// TestKubectlCrust looks at a cluster, and tries a class.
func TestKubectlCrust(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Block)
	d := newDaemonSet(k)
	p := &plugin{k, t.TempDir()}
	k.Must(os.Symlink(rig.Program(t, "crustctl"), filepath.Join(p.dir, "kubectl-crust")))
	v := k.NewClaim(cluster.VolumeOptions{Name: "shown", Driver: cluster.Block, FS: "xfs"})
	k.Must(k.Proxy.Stop())
	pod := k.NewPod("shown", cluster.Crust).With(v, "/data")
	d.install()
	t.Cleanup(d.remove)
	d.waitReady("")
	d.start(pod)

	k.Eventually("both drivers are ready", func(context.Context) error {
		if out := p.run("nodes"); !strings.Contains(out, "2/2") {
			return errors.New(out)
		}
		return nil
	})
	p.wants("nodes", "node-1", " 1 1 0 0 0 2/2", "<nil>")
	p.wants("volumes -n default", "node-1 BOUND default/shown", cluster.Block+" crust")
	p.wants("check", "ok cluster Kubernetes v1.", "ok installation DaemonSet crust-proxy/crust-proxy: 1 of 1", "ok daemons 1 of 1", "ok driver "+cluster.Block,
		"ok handler crust", "ok volumes 1 volume, 1 bound", "<nil>")
	class := " --storage-class " + cluster.DelayedClass(cluster.Block) + " --image " + cri.BusyboxImage + " --size 400Mi"
	p.wants("test --runtime-class crust"+class, "ok class", "ok created", "ok written", `ok deferred`, `rule "crust-pods", way block, handler crust`,
		"ok guarded", "the host sees a guard", "ok stats", "ok growth", "ok deleted", "ok cleaned up", "<nil>")
	p.wants("test"+class, "ok written", "fail deferred", "no rule defers it", "ok cleaned up", "exit status 3")

	p.wants("nodes --node-selector kubernetes.io/os=linux", "node-1", "2/2") // by the node's own address
	archive := filepath.Join(t.TempDir(), "bundle.tar.gz")
	p.wants("bundle --file "+archive, "1 node, ", "<nil>")
	list, err := exec.Command("tar", "-tzf", archive).Output()
	k.Must(err)
	for _, name := range []string{"check.txt", "nodes/node-1/log.txt", "nodes/node-1/volumes.json", "nodes/node-1/metrics.txt", "config/crust-proxy/config.yaml"} {
		check.That(t, strings.Contains(string(list), "crust-bundle/"+name+"\n"), "the bundle has no %s:\n%s", name, list)
	}
	wantPage(k)
}

// wantPage wants the API server's proxy, which parses and rewrites pages, to leave the style as it is: the browser compares
// it with the hash in the policy.
func wantPage(k *cluster.Kube) {
	k.T.Helper()
	own, err := http.Get("http://" + cluster.NodeAddress + ":9814/")
	k.Must(err)
	policy := own.Header.Get("Content-Security-Policy")
	_ = own.Body.Close()
	found, err := k.Client.CoreV1().Pods(proxySpace).List(k.T.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + cluster.NodeName})
	k.Must(err)
	path := "/api/v1/namespaces/" + proxySpace + "/pods/" + found.Items[0].Name + ":9814/proxy/"
	raw, err := k.Client.CoreV1().RESTClient().Get().AbsPath(path).Do(k.T.Context()).Raw()
	k.Must(err)
	_, rest, _ := strings.Cut(string(raw), "<style>")
	style, _, _ := strings.Cut(rest, "</style>")
	hash := sha256.Sum256([]byte(style))
	check.That(k.T, strings.Contains(policy, "'sha256-"+base64.StdEncoding.EncodeToString(hash[:])+"'") && strings.Contains(string(raw), "default/shown"),
		"with the policy %q, through the API server the page is:\n%s", policy, raw)
}
