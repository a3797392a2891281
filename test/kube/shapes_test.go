//go:build system

package kube_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestShapesOfPods is about all that a pod may do with its volumes.
func TestShapesOfPods(t *testing.T) {
	k := cluster.Beside(t)
	inEachWay(k, t, "containers", manyContainers)
	inEachWay(k, t, "readers", readers)
	inEachWay(k, t, "inline", inline)
	if !olderThan(k, "37") { // kubelet did not ask for the health of volumes
		inEachWay(k, t, "health", health)
	}
}

// manyContainers has one volume in a pod's containers of all kinds, in all the ways
// that they can mount it. Then the sandbox is made anew.
func manyContainers(k *cluster.Kube, way, driver string) {
	label := `context="system_u:object_r:container_file_t:s0:c1,c2"` // as kubelet adds where the node has SELinux
	v := k.NewVolume(cluster.VolumeOptions{Name: "many-" + way, Driver: driver, Options: []string{label}})
	p := k.NewPod("many-"+way, cluster.Crust).With(v, "/data").
		With(v, "/one", subPath("dirs/one")).
		With(v, "/own", func(m *corev1.VolumeMount) { m.SubPathExpr = "of-$(POD_NAME)" }).
		With(v, "/look", func(m *corev1.VolumeMount) { m.ReadOnly = true }).
		With(v, "/deep", func(m *corev1.VolumeMount) {
			m.ReadOnly, m.RecursiveReadOnly = true, new(corev1.RecursiveReadOnlyEnabled)
		})
	main := &p.Spec.Containers[0]
	main.Env = []corev1.EnvVar{{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"},
	}}}
	second := cluster.Sleeper("second")
	second.VolumeMounts = []corev1.VolumeMount{mount(v, "/elsewhere"), mount(v, "/two", subPath("dirs/two"))}
	p.Spec.Containers = append(p.Spec.Containers, second)
	prepares := cluster.Container("prepares", "echo prepared > /in/file && echo x > /one/init && sync")
	prepares.VolumeMounts = []corev1.VolumeMount{mount(v, "/in"), mount(v, "/one", subPath("dirs/one"))}
	always := corev1.ContainerRestartPolicyAlways
	sidecar := cluster.Sleeper("sidecar")
	sidecar.RestartPolicy, sidecar.VolumeMounts = &always, []corev1.VolumeMount{mount(v, "/side")}
	p.Spec.InitContainers = []corev1.Container{prepares, sidecar}
	p.Start()
	wantGuarded(k, p, v)
	wantDeferred(k, p, v, inCrust)

	wantOut(k, p, "main", "cat /data/file /one/init /look/file /deep/file && ls /data/dirs", "prepared\nx\nprepared\nprepared\none\ntwo\n")
	p.Exec("echo main > /data/main && echo own > /own/file")
	wantOut(k, p, "second", "cat /elsewhere/main /elsewhere/of-"+p.Name+"/file && echo second > /two/file", "main\nown\n")
	wantOut(k, p, "sidecar", "cat /side/main /side/dirs/two/file", "main\nsecond\n")
	for _, path := range []string{"/look/x", "/deep/x"} {
		out, err := p.TryExec("main", "touch "+path)
		check.That(k.T, err != nil && strings.Contains(err.Error(), "Read-only file system"), "a read-only mount can be written: %q, %v", out, err)
	}
	wantOut(k, p, "main", "touch /data/x && rm /data/x", "") // which the other mount still can
	sandboxAgain(k, p, v)
	p.WaitStats(v, "/data")
	p.Delete()
}

// sandboxAgain takes the sandbox away: kubelet makes another one for the same pod, and calls nobody for its volumes.
func sandboxAgain(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume) {
	k.T.Helper()
	heard, sandbox := callsFrom(k, v.Driver), sandboxOf(k, p)
	p.Exec("echo before the end > /data/end && sync")
	k.Must(check.Err(k.Containerd.CRI.StopPodSandbox(k.T.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: sandbox})))
	k.Eventually("pod "+p.Name+" gets another sandbox", func(context.Context) error {
		if is, err := p.Sandbox(); err != nil || is == sandbox {
			return fmt.Errorf("it has %s, %w", is, err)
		}
		return nil
	})
	waitOut(k, p, "main", "cat /data/end /one/init /own/file", "before the end\nx\nown\n")
	waitOut(k, p, "second", "cat /elsewhere/end /two/file", "before the end\nsecond\n")
	p.WaitReady()
	wantGuarded(k, p, v)
	asked := slices.DeleteFunc(heard.of(v), func(call string) bool { return call == "NodeGetVolumeStats" })
	check.Empty(k.T, asked, "the driver was called for more than stats")
}

func sandboxOf(k *cluster.Kube, p *cluster.Pod) string {
	k.T.Helper()
	sandbox, err := p.Sandbox()
	k.Must(err)
	return sandbox
}

func wantOut(k *cluster.Kube, p *cluster.Pod, container, script, want string) {
	k.T.Helper()
	got, err := p.TryExec(container, script)
	check.That(k.T, err == nil && got == want, "%s in %s: %q, %v", script, container, got, err)
}

// waitOut is for a container that is about to run.
func waitOut(k *cluster.Kube, p *cluster.Pod, container, script, want string) {
	k.T.Helper()
	k.Eventually(script+" in "+container, func(context.Context) error {
		if got, err := p.TryExec(container, script); err != nil || got != want {
			return fmt.Errorf("%q, %w", got, err)
		}
		return nil
	})
}

// readers has several pods read one volume at once, and none of them write it.
func readers(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "readers-" + way, Driver: driver})
	writer := k.NewPod("writer-"+way, cluster.Crust).With(v, "/data").Start()
	writer.Exec("echo written > /data/file && sync")
	writer.Delete()
	var all []*cluster.Pod
	for _, name := range []string{"reader-a-", "reader-b-"} {
		all = append(all, readsOnly(k.NewPod(name+way, cluster.Crust).With(v, "/data"), v).Create())
	}
	late := k.NewPod("late-"+way, cluster.Crust).With(v, "/data")
	for _, p := range all {
		p.WaitReady()
		wantGuarded(k, p, v)
		wantOut(k, p, "main", "cat /data/file", "written\n")
		out, err := p.TryExec("main", "echo x > /data/x")
		check.That(k.T, err != nil && strings.Contains(err.Error(), "Read-only file system"), "a read-only claim can be written: %q, %v", out, err)
	}
	// A writer waits until nobody reads.
	late.Create().WaitEvent("FailedMount", "one sandbox can have it read-write, or several read-only", "wait until the other pod is gone")
	for _, p := range all {
		p.WaitStats(v, "/data")
		p.AskDelete()
	}
	late.WaitReady()
	wantOut(k, late, "main", "cat /data/file && echo more > /data/file && sync", "written\n")
	late.Delete()
}

// inline has a volume that a driver makes at the publish, if it can.
func inline(k *cluster.Kube, way, driver string) {
	p := k.NewPod("inline-"+way, cluster.Crust).WithInline("inline", driver, "/inline", 64*cluster.Mib).Create()
	if driver == cluster.Native {
		p.WaitReady()
		wantOut(k, p, "main", "echo inline > /inline/file && grep -c ' /inline ext4 ' /proc/mounts", "1\n")
		has := p.DF("/inline")
		check.That(k.T, has.Total <= 64*cluster.Mib && has.Total >= 40*cluster.Mib, "the inline volume has %+v", has)
	} else {
		p.WaitEvent("FailedMount", driver+" cannot defer by itself", "use a generic ephemeral volume")
	}
	p.Delete()
}

// TestRepublish has drivers that kubelet calls again and again, with tokens in secrets.
func TestRepublish(t *testing.T) {
	k := cluster.On(t)
	for _, driver := range ways {
		setDriver(k, driver, `{"requiresRepublish": true, "serviceAccountTokenInSecrets": true, "tokenRequests": [{"audience": "storage"}], "seLinuxMount": true}`,
			`{"requiresRepublish": false, "serviceAccountTokenInSecrets": null, "tokenRequests": null, "seLinuxMount": false}`)
	}
	inEachWay(k, t, "again", func(k *cluster.Kube, way, driver string) {
		v := k.NewVolume(cluster.VolumeOptions{Name: "again-" + way, Driver: driver})
		p := k.NewPod("again-"+way, cluster.Crust).With(v, "/data").Start()
		p.Exec("echo kept > /data/file")
		wantGuarded(k, p, v)
		wantOut(k, p, "main", "cat /data/file", "kept\n")
		p.Delete()
		check.That(k.T, olderThan(k, "35") || k.Drivers[driver].Vendors.Tokens.Load() > 0, "%s got no token", driver)
		for _, dir := range []string{k.Dir, "/run/crust-proxy"} {
			out, _ := exec.Command("grep", "-rlI", "--include=*.log", "--include=*.json", "eyJhbGciOi", dir).Output()
			check.That(k.T, len(out) == 0, "tokens are in %s", out)
		}
	})
}

func olderThan(k *cluster.Kube, minor string) bool {
	is, err := k.Client.Discovery().ServerVersion()
	k.Must(err)
	return is.Minor < minor
}

// health has the status of a pod show what is wrong with its volume: what the sandbox knows, and what the driver knows.
func health(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "health-" + way, Driver: driver})
	p := k.NewPod("health-"+way, cluster.Crust).With(v, "/data").Start()
	shows := func(want string) {
		k.Eventually("the status shows "+want, func(context.Context) error {
			got, err := k.Kubectl("get", "pod", p.Name, "-o", "jsonpath={range .status.volumeHealth[*].healthConditions[*]}{.status} {.reason};{end}")
			if err != nil || got != want {
				return fmt.Errorf("%q, %w", got, err)
			}
			return nil
		})
	}
	is, err := crustctl(k, p.Target(v))
	k.Must(err)
	image := rig.Loops(k.Dir)[is.Device]
	k.T.Cleanup(func() { _ = os.Rename(image+"~", image) })
	k.Must(os.Rename(image, image+"~"))
	k.Must(os.WriteFile("/sys/fs/ext4/"+filepath.Base(is.Device)+"/trigger_fs_error", []byte("a test"), 0))
	shows("Degraded ReadOnly;Inaccessible ImageMissing;")
	k.Must(os.Rename(image+"~", image))
	shows("Degraded ReadOnly;")
	p.Delete()
}
