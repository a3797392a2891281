//go:build system

package kube_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// inCrust is the rule of the default settings: what pods of the runtime class have is deferred.
const inCrust = "crust-pods"

// ways are the drivers whose volumes are deferred, each in its own way.
var ways = map[string]string{"block": cluster.Block, "native": cluster.Native}

// inEachWay runs a part of a test with each driver, and beside the other parts.
func inEachWay(k *cluster.Kube, t *testing.T, name string, part func(k *cluster.Kube, way, driver string)) {
	for way, driver := range ways {
		t.Run(name+" "+way, func(t *testing.T) {
			t.Parallel()
			part(k.For(t), way, driver)
		})
	}
}

func subPath(dir string) func(*corev1.VolumeMount) {
	return func(m *corev1.VolumeMount) { m.SubPath = dir }
}

// mount is a mount of a volume, for containers other than main.
func mount(v *cluster.Volume, path string, changes ...func(*corev1.VolumeMount)) corev1.VolumeMount {
	m := corev1.VolumeMount{Name: v.Name, MountPath: path}
	for _, change := range changes {
		change(&m)
	}
	return m
}

// readsOnly has a pod use a claim read-only.
func readsOnly(p *cluster.Pod, v *cluster.Volume) *cluster.Pod {
	for i := range p.Spec.Volumes {
		if claim := p.Spec.Volumes[i].PersistentVolumeClaim; claim != nil && claim.ClaimName == v.Name {
			claim.ReadOnly = true
		}
	}
	return p
}

// shown is what crustctl shows of a volume.
type shown struct {
	State, Driver, Handler, Rule, Way, Device string
	TargetPath, PodName, RefusedBy, LastError string
	Snapshots                                 string
}

// crustctl shows one volume as a program gets it. It fails where there is none.
func crustctl(k *cluster.Kube, target string) (shown, error) {
	k.T.Helper()
	var is shown
	err := ask(k, &is, "get", target)
	return is, err
}

func listed(k *cluster.Kube, flags ...string) ([]shown, error) {
	k.T.Helper()
	var all struct{ Volumes []shown }
	err := ask(k, &all, append([]string{"list"}, flags...)...)
	return all.Volumes, err
}

func ask(k *cluster.Kube, into any, args ...string) error {
	k.T.Helper()
	var out, complaints bytes.Buffer
	cmd := exec.Command(rig.Program(k.T, "crustctl"), append([]string{"--socket", cluster.AdminSocket, "-o", "json"}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("crustctl %s: %w: %s", strings.Join(args, " "), err, complaints.String())
	}
	return json.Unmarshal(out.Bytes(), into)
}

// wantDeferred wants a pod's volume in its sandbox, by a rule and in a way.
func wantDeferred(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume, rule string) {
	k.T.Helper()
	is, err := crustctl(k, p.Target(v))
	k.Must(err)
	check.That(k.T, is.State == "VOLUME_STATE_BOUND" && is.Rule == fmt.Sprintf("rule %q", rule) && is.PodName == p.Name && ways[is.Way] == v.Driver,
		"crustctl shows %+v", is)
}

// wantGuarded wants the volume's filesystem in the pod, and nowhere on the node.
func wantGuarded(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume) {
	k.T.Helper()
	is, err := crustctl(k, p.Target(v))
	k.Must(err)
	check.Says(k.T, "/proc/mounts", p.Exec("grep ' /data ' /proc/mounts"), " "+v.FS+" ")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	k.Must(err)
	for line := range strings.SplitSeq(string(mounts), "\n") {
		check.That(k.T, !strings.Contains(line, p.Target(v)) || strings.Contains(line, " tmpfs crust:"), "at the target is no guard: %s", line)
		check.That(k.T, !strings.Contains(line, " - "+v.FS+" "+is.Device+" "), "it is mounted on the node: %s", line)
	}
}

// wantOnHost wants a pod's volume mounted by the driver, on the node.
func wantOnHost(k *cluster.Kube, p *cluster.Pod, v *cluster.Volume) {
	k.T.Helper()
	is, err := crustctl(k, p.Target(v))
	check.That(k.T, err != nil, "crustctl shows %+v", is)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	k.Must(err)
	for line := range strings.SplitSeq(string(mounts), "\n") {
		if strings.Contains(line, " "+p.Target(v)+" ") && strings.Contains(line, " - "+v.FS+" /dev/loop") {
			return
		}
	}
	k.T.Errorf("nothing of the driver is mounted on %s", p.Target(v))
}

// calls reads the log of a driver.
type calls struct {
	k    *cluster.Kube
	file string
	from int
}

// callsFrom begins to listen to the calls that a driver gets from now on.
func callsFrom(k *cluster.Kube, driver string) *calls {
	k.T.Helper()
	c := &calls{k: k, file: filepath.Join(k.Dir, driver+".log")}
	c.from = len(c.read())
	return c
}

func (c *calls) read() []byte {
	c.k.T.Helper()
	raw, err := os.ReadFile(c.file)
	c.k.Must(err)
	return raw
}

// of lists the methods that were called for a volume, and how those that failed
// have ended. kubelet asks for health whenever it likes.
func (c *calls) of(v *cluster.Volume) []string {
	c.k.T.Helper()
	var out []string
	for line := range strings.SplitSeq(string(c.read()[c.from:]), "\n") {
		var call struct{ Method, Volume, Code string }
		if json.Unmarshal([]byte(line), &call) != nil || call.Method == "" || call.Volume != v.Handle || call.Method == "NodeGetVolumeHealth" {
			continue
		}
		if call.Code != "OK" {
			call.Method += " " + call.Code
		}
		out = append(out, call.Method)
	}
	return out
}
