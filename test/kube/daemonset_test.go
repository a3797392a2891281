//go:build system

package kube_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestDaemonSet takes a node from a daemon of its own to the chart's DaemonSet,
// upgrades that, and goes back, all under pods with deferred volumes.
func TestDaemonSet(t *testing.T) {
	k := cluster.On(t)
	d := newDaemonSet(k)
	first := k.NewVolume(cluster.VolumeOptions{Name: "before", Driver: cluster.Block})
	before := d.start(k.NewPod("before", cluster.Crust).With(first, "/data"))
	before.Exec("echo kept > /data/file && sync")

	k.Must(k.Proxy.Stop())
	d.install()
	d.waitReady("")
	wantGuarded(k, before, first)
	before.WaitStats(first, "/data")
	d.wantInstalled()

	// What the container mounts, the node sees; what it formats, it formats.
	second := k.NewVolume(cluster.VolumeOptions{Name: "during", Driver: cluster.Block, FS: "xfs"})
	during := d.start(k.NewPod("during", cluster.Crust).With(second, "/data"))
	during.Exec("echo kept > /data/file && sync")
	wantGuarded(k, during, second)
	d.wantHealthy()
	d.helm("test", "crust-proxy", "--timeout=2m")

	// Another policy: the running container takes it up.
	old := d.pod()
	d.install("--set=config.policy.format=never")
	d.waitLog("configuration reloaded")
	check.Equal(t, d.pod(), old, "a changed policy made another pod of the DaemonSet")

	// An upgrade: another container, under pods that run on; and with another identity,
	// that of the chart's service account.
	d.install("--set=cluster.source=serviceAccount", "--set-json", d.apiServer())
	d.waitReady(old)
	third := k.NewVolume(cluster.VolumeOptions{Name: "after", Driver: cluster.Native})
	after := d.start(k.NewPod("after", cluster.Crust).With(third, "/data"))
	wantGuarded(k, after, third)
	d.wantHealthy()
	after.Delete()
	second.Grow(2 * second.Size)
	second.WaitGrown()
	during.WaitStats(second, "/data")
	before.Delete()

	// And back, with the volume that it has still; for which one has to insist.
	d.wantRemovalRefused()
	d.remove()
	k.Must(k.Proxy.Start())
	wantGuarded(k, during, second)
	check.Equal(t, during.Exec("cat /data/file"), "kept\n", "the pod reads")
	is, err := during.Get(t.Context())
	k.Must(err)
	restarts := is.Status.ContainerStatuses[0].RestartCount
	check.That(t, restarts == 0, "the pod's container was restarted %d times", restarts)
	during.Delete()
}

// daemonSet is the chart's, on the test's node.
type daemonSet struct {
	k      *cluster.Kube
	values string
	bin    string
}

const proxySpace = "crust-proxy"

// newDaemonSet makes the image, and the values that fit the rig: without a network of
// pods, with all that is the test's below /tmp.
func newDaemonSet(k *cluster.Kube) *daemonSet {
	t, ok := k.T.(*testing.T)
	check.Require(k.T, ok, "this is for tests")
	k.Must(k.Containerd.AddImage(proxyImage, proxyLayer(t), []string{"/usr/bin/crust-proxy"}))
	d := &daemonSet{k: k, values: filepath.Join(t.TempDir(), "values.yaml"), bin: k.Dir + "/bin"}
	k.Must(os.WriteFile(d.values, fmt.Appendf(nil, `
image: {repository: localhost/crust-proxy, tag: test, pullPolicy: Never}
cluster: {source: kubeconfig, kubeconfig: %[1]s}
crustRunc: {install: true, directory: %[2]s}
removalCheck: {address: "%[5]s:9814"}
runtimeClasses: []
admission: {validate: {enabled: false}}
daemonset:
  hostNetwork: true
  resources: {requests: {cpu: 1m, memory: 1Mi}}
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}
  extraVolumes: [{name: tmp, hostPath: {path: /tmp, type: Directory}}]
  extraVolumeMounts: [{name: tmp, mountPath: /tmp, mountPropagation: HostToContainer}]
config:
  handlers:
    kata: {enabled: false}
    crust: {programs: [%[3]s], tempDir: /run/crust-temp}
  containerd: {socket: %[4]s}
  log: {level: debug}
  policy:
    rules: [{name: crust-pods, runtimeHandlers: [crust], defer: true}]
`, k.NodeAccess, d.bin, rig.Program(t, "crust-runc"), k.Containerd.Socket, cluster.NodeAddress), 0o600))
	return d
}

// start starts a pod. Whatever happens, the DaemonSet is gone before the pod is taken away, with the node's own daemon.
func (d *daemonSet) start(p *cluster.Pod) *cluster.Pod {
	d.k.T.Helper()
	p.Create()
	d.k.T.Cleanup(d.remove)
	p.WaitReady()
	return p
}

func (d *daemonSet) install(args ...string) {
	d.k.T.Helper()
	d.helm(append([]string{"upgrade", "--install", "crust-proxy", render.Chart(), "--create-namespace", "--values=" + d.values}, args...)...)
}

func (d *daemonSet) helm(args ...string) string {
	d.k.T.Helper()
	out, err := render.Helm(d.k.T, append(args, "--kubeconfig="+d.k.AdminKubeconfig, "--namespace="+proxySpace)...)
	d.k.Must(err)
	return out
}

// apiServer has pods find it: the rig's services have no addresses.
func (d *daemonSet) apiServer() string {
	d.k.T.Helper()
	at, err := url.Parse(d.k.URL)
	d.k.Must(err)
	return fmt.Sprintf(`daemonset.extraEnv=[{"name": "KUBERNETES_SERVICE_HOST", "value": %q}, {"name": "KUBERNETES_SERVICE_PORT", "value": %q}]`,
		at.Hostname(), at.Port())
}

// find gives the DaemonSet's pod; an empty one where there is none.
func (d *daemonSet) find(ctx context.Context) (corev1.Pod, error) { return d.only(ctx, "crust-proxy") }

// only gives the one pod of that name's label.
func (d *daemonSet) only(ctx context.Context, name string) (corev1.Pod, error) {
	found, err := d.k.Client.CoreV1().Pods(proxySpace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + name})
	if err != nil || len(found.Items) == 0 {
		return corev1.Pod{}, err
	}
	if len(found.Items) > 1 {
		return corev1.Pod{}, errors.New("there are two pods on one node")
	}
	return found.Items[0], nil
}

// pod is the name of the one that runs.
func (d *daemonSet) pod() string {
	d.k.T.Helper()
	is, err := d.find(d.k.T.Context())
	d.k.Must(err)
	return is.Name
}

// waitReady waits until another pod than the old one serves.
func (d *daemonSet) waitReady(old string) {
	d.k.T.Helper()
	defer func() {
		if d.k.T.Failed() {
			d.k.T.Log(d.describe())
		}
	}()
	d.k.Eventually("the DaemonSet's pod serves", func(ctx context.Context) error {
		is, err := d.find(ctx)
		if err != nil {
			return err
		}
		for _, condition := range is.Status.Conditions {
			if is.Name != old && condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%s is %s", is.Name, is.Status.Phase)
	})
}

func (d *daemonSet) describe() string {
	about, err := d.k.Kubectl("describe", "pods,daemonsets", "--namespace="+proxySpace)
	logs, err2 := d.k.Kubectl("logs", "--namespace="+proxySpace, "--selector=app.kubernetes.io/name=crust-proxy", "--tail=40", "--all-containers")
	return fmt.Sprint(about, err, "\n", logs, err2)
}

// waitLog waits until the daemon has said something.
func (d *daemonSet) waitLog(words string) {
	d.k.T.Helper()
	d.k.Eventually("it says "+words, func(context.Context) error {
		log, err := d.k.Kubectl("logs", "--namespace="+proxySpace, d.pod(), "--container=crust-proxy")
		if err == nil && !strings.Contains(log, words) {
			err = errors.New("not yet")
		}
		return err
	})
}

// wantInstalled wants crust-runc on the node, as it is in the image.
func (d *daemonSet) wantInstalled() {
	d.k.T.Helper()
	for _, name := range []string{"crust-runc", "crust-runc-agent"} {
		is, err := os.ReadFile(filepath.Join(d.bin, name))
		d.k.Must(err)
		want, err := os.ReadFile(rig.Program(d.k.T, name))
		d.k.Must(err)
		check.That(d.k.T, bytes.Equal(is, want), "%s on the node is not the image's", name)
	}
}

// wantHealthy has crustctl in the container look at the node.
func (d *daemonSet) wantHealthy() {
	d.k.T.Helper()
	check.Says(d.k.T, "crustctl list", d.crustctl("list"), "BOUND")
	check.Says(d.k.T, "crustctl doctor", d.crustctl("doctor", "--wait", "2m"), " 0 errors")
}

func (d *daemonSet) crustctl(args ...string) string {
	d.k.T.Helper()
	out, err := d.k.Kubectl(append([]string{"exec", "--namespace=" + proxySpace, d.pod(), "--container=crust-proxy", "--", "/usr/bin/crustctl"}, args...)...)
	d.k.Must(err)
	return out
}

// wantRemovalRefused has the chart ask the nodes before it goes.
func (d *daemonSet) wantRemovalRefused() {
	d.k.T.Helper()
	refused := check.Begin(func() error {
		return check.Err(render.Helm(d.k.T, "uninstall", "crust-proxy", "--namespace="+proxySpace, "--kubeconfig="+d.k.AdminKubeconfig))
	})
	d.k.Eventually("the removal is asked for", func(ctx context.Context) error {
		is, err := d.only(ctx, "crust-proxy-removal")
		if err == nil && is.Status.Phase != corev1.PodFailed {
			err = fmt.Errorf("%q is %s", is.Name, is.Status.Phase)
		}
		return err
	})
	err := <-refused
	for _, words := range []string{"job crust-proxy-removal failed", "1 deferred volume(s) live there, of driver " + cluster.Block, " behind the front there: "} {
		check.That(d.k.T, err != nil && strings.Contains(err.Error(), words), "helm removes it while a volume lives, or does not say %q: %v", words, err)
	}
	d.rollback(err)
	d.k.Must(check.Err(d.k.Kubectl("delete", "--namespace="+proxySpace, "job/crust-proxy-removal")))
	is, err := d.find(d.k.T.Context())
	check.That(d.k.T, err == nil && is.Name != "" && is.DeletionTimestamp == nil, "the DaemonSet's pod goes: %v", err)
}

// rollback does what the refusal of a removal advises, and wants the release to be usable.
func (d *daemonSet) rollback(refusal error) {
	d.k.T.Helper()
	_, rest, advised := strings.Cut(fmt.Sprint(refusal), "\n  helm rollback ")
	command, _, _ := strings.Cut(rest, "\n")
	check.Require(d.k.T, advised, "the refusal does not say how the release is used again: %v", refusal)
	list := func() string { return strings.TrimSpace(d.helm("list", "--short")) }
	is := list()
	check.That(d.k.T, is == "", "helm lists %q after a refused removal: the advice to roll back may not be needed any more", is)
	d.k.Must(check.Err(render.Helm(d.k.T, append(append([]string{"rollback"}, strings.Fields(command)...), "--kubeconfig="+d.k.AdminKubeconfig)...)))
	is = list()
	check.That(d.k.T, is == "crust-proxy", "after the rollback helm lists %q", is)
}

// remove uninstalls the chart, whatever lives, and waits until its pod has gone. A second time it does nothing.
func (d *daemonSet) remove() {
	d.k.T.Helper()
	d.helm("uninstall", "crust-proxy", "--ignore-not-found", "--no-hooks")
	d.k.Eventually("the DaemonSet's pod goes", func(ctx context.Context) error {
		is, err := d.find(ctx)
		if err == nil && is.Name != "" {
			err = errors.New(is.Name + " is there")
		}
		return err
	})
}

const proxyImage = "localhost/crust-proxy:test"

// proxyLayer is what hack/image.sh makes, of this machine's files: our
// programs, what looks at devices and formats them, and a shell.
func proxyLayer(t *testing.T) []byte {
	t.Helper()
	files := map[string]string{} // where they go, and where they are
	for _, name := range []string{"crust-proxy", "crustctl", "crust-runc", "crust-runc-agent"} {
		files["usr/bin/"+name] = rig.Program(t, name)
	}
	for _, name := range []string{"blkid", "mkfs.ext4", "mkfs.xfs", "sh", "busybox", "cp", "mv", "rm", "chmod"} {
		files["bin/"+name] = lookUp(t, name)
	}
	for _, program := range slices.Collect(maps.Values(files)) {
		for _, library := range libraries(t, program) {
			files[strings.TrimPrefix(library, "/")] = library
		}
	}
	return packed(t, files)
}

func lookUp(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	check.Must(t, err)
	return path
}

var libraryPath = regexp.MustCompile(`(/\S+) \(0x`)

// libraries are those that a program is linked with.
func libraries(t *testing.T, program string) []string {
	t.Helper()
	out, err := exec.Command("ldd", program).CombinedOutput()
	check.Require(t, err == nil || bytes.Contains(out, []byte("not a dynamic executable")), "ldd %s: %v: %s", program, err, out)
	var all []string
	for _, match := range libraryPath.FindAllSubmatch(out, -1) {
		all = append(all, string(match[1]))
	}
	return all
}

func packed(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	// As in hack/image.sh: a directory, and no link to /run, which is the node's.
	check.Must(t, w.WriteHeader(&tar.Header{Name: "var/run/secrets/", Typeflag: tar.TypeDir, Mode: 0o755}))
	for _, name := range slices.Sorted(maps.Keys(files)) {
		raw := check.Value(os.ReadFile(files[name]))(t)
		check.Must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(raw))}))
		check.Must(t, check.Err(w.Write(raw)))
	}
	check.Must(t, w.Close())
	return out.Bytes()
}
