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

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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

func newPlugin(k *cluster.Kube, dir string) *plugin {
	k.Must(os.Symlink(rig.Program(k.T, "crustctl"), filepath.Join(dir, "kubectl-crust")))
	return &plugin{k, dir}
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

// secondNode is a node of the API server whose daemon is another one on this machine. Nothing but that and its objects
// is real of it: the DaemonSet's pod there is told to run at the daemon's address.
const secondNode, secondAddress = "node-2", "10.88.0.2"

func addSecondNode(k *cluster.Kube) {
	k.T.Helper()
	ctx := context.Background()
	rig.Command(k.T, "ip", "addr", "add", secondAddress+"/24", "dev", "knode")
	dir := k.T.TempDir()
	k.Must(os.MkdirAll("/run/crust-second", 0o700))
	k.Must(os.WriteFile(dir+"/config.yaml", fmt.Appendf(nil, "runDir: /run/crust-second\nkubeletRoot: %s\nhttp: {listen: \"%s:9814\"}\ncluster: {nodeName: %s}\nhandlers: {kata: {directVolumes: %s}}\ncontainerd: {socket: \"\"}\n",
		dir, secondAddress, secondNode, dir+"/kata"), 0o600))
	daemon := &rig.Process{Name: "second", Program: rig.Program(k.T, "crust-proxy"), Args: []string{"--config", dir + "/config.yaml"}, LogFile: dir + "/log"}
	daemon.Ready = func() error {
		reply, err := http.Get("http://" + secondAddress + ":9814/readyz")
		if err == nil {
			_ = reply.Body.Close()
		}
		return err
	}
	k.Must(daemon.Start())
	k.T.Cleanup(func() { daemon.Kill(); _ = os.RemoveAll("/run/crust-second") })
	nodes := k.Client.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: secondNode, Labels: map[string]string{"kubernetes.io/os": "linux"}}}, metav1.CreateOptions{})
	k.Must(err)
	const room = `{"cpu": "4", "memory": "4Gi", "pods": "10"}`
	address := fmt.Sprintf(`{"status": {"capacity": %s, "allocatable": %s, "addresses": [{"type": "InternalIP", "address": %q}]}}`, room, room, secondAddress)
	_, err = nodes.Patch(ctx, secondNode, types.StrategicMergePatchType, []byte(address), metav1.PatchOptions{}, "status")
	k.Must(err)
	k.T.Cleanup(func() {
		_, err := k.Kubectl("delete", "node", secondNode)
		k.Must(err)
		_, _ = k.Kubectl("delete", "pods", "--namespace="+proxySpace, "--field-selector=spec.nodeName="+secondNode, "--force", "--grace-period=0")
	})
}

func runSecondPod(k *cluster.Kube) {
	k.T.Helper()
	k.Eventually("the second node's pod runs", func(ctx context.Context) error {
		found, err := k.Client.CoreV1().Pods(proxySpace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + secondNode})
		if err != nil || len(found.Items) != 1 {
			return errors.Join(err, fmt.Errorf("%d pods", len(found.Items)))
		}
		pod := &found.Items[0]
		pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodRunning, secondAddress, []corev1.PodIP{{IP: secondAddress}}
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		_, err = k.Client.CoreV1().Pods(proxySpace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
		return err
	})
}

// TestKubectlCrust looks at a cluster of two nodes, and tries a class.
func TestKubectlCrust(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Block)
	d := newDaemonSet(k)
	p := newPlugin(k, t.TempDir())
	v := k.NewClaim(cluster.VolumeOptions{Name: "shown", Driver: cluster.Block, FS: "xfs"})
	k.Must(k.Proxy.Stop())
	pod := k.NewPod("shown", cluster.Crust).With(v, "/data")
	d.install("--set=config.http.listen=" + cluster.NodeAddress + ":9814") // the second node has the port at its own address
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
		"ok handler crust", "ok volumes 1 volumes, 1 bound", "<nil>")
	class := " --storage-class " + cluster.DelayedClass(cluster.Block) + " --image " + cri.BusyboxImage + " --size 400Mi"
	p.wants("test --runtime-class crust"+class, "ok class", "ok created", "ok written", `ok deferred`, `rule "crust-pods", way block, handler crust`,
		"ok guarded", "the host sees a guard", "ok stats", "ok growth", "ok deleted", "ok cleaned up", "<nil>")
	p.wants("test"+class, "ok written", "fail deferred", "no rule defers it", "ok cleaned up", "exit status 3")

	addSecondNode(k)
	runSecondPod(k)
	k.Eventually("both are asked", func(context.Context) error {
		if out := p.run("nodes"); strings.Count(out, "ok") < 2 {
			return errors.New(out)
		}
		return nil
	})
	p.wants("check", "2 of 2 nodes answer", "warn configuration", "on 1 nodes (node-2)", "<nil>")
	p.wants("nodes --node-selector kubernetes.io/os=linux", "node-1", "node-2") // by the nodes' own addresses
	archive := filepath.Join(t.TempDir(), "bundle.tar.gz")
	p.wants("bundle --file "+archive, "2 nodes", "<nil>")
	list, err := exec.Command("tar", "-tzf", archive).Output()
	k.Must(err)
	for _, name := range []string{"check.txt", "nodes/node-1/log.txt", "nodes/node-1/volumes.json", "nodes/node-2/metrics.txt", "config/crust-proxy/config.yaml"} {
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
	if !strings.Contains(policy, "'sha256-"+base64.StdEncoding.EncodeToString(hash[:])+"'") || !strings.Contains(string(raw), "default/shown") {
		k.T.Errorf("with the policy %q, through the API server the page is:\n%s", policy, raw)
	}
}
