//go:build system

package driver_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/deploy/render"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestTheChartsContainer runs the driver as the chart's container: with its arguments, its
// environment and its mounts, and a root filesystem that is read-only.
func TestTheChartsContainer(t *testing.T) {
	r := layOut(t, "xfs")
	kubelet, plugin := r.dir, r.dir+"/plugins/driver.crust-proxy.dev"
	check.Must(t, os.MkdirAll(plugin, 0o750))
	check.Must(t, os.MkdirAll(kubelet+"/crust-proxy/registry", 0o750)) // crust-proxy's
	check.Must(t, unix.Mount(kubelet, kubelet, "", unix.MS_BIND, ""))
	check.Must(t, unix.Mount("", kubelet, "", unix.MS_SHARED, ""))

	container, volumes := chartsDriver(t, "kubeletRoot="+kubelet, "crustDriver.dataDir="+r.data, "crustDriver.node=node-a")
	var script strings.Builder
	for _, m := range container.VolumeMounts {
		at := slices.IndexFunc(volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if at < 0 || volumes[at].HostPath == nil {
			t.Fatalf("%s is no directory of the host", m.Name)
		}
		fmt.Fprintf(&script, "mount --rbind '%s' '%s'\n", volumes[at].HostPath.Path, m.MountPath)
	}
	if !*container.SecurityContext.ReadOnlyRootFilesystem || len(container.VolumeMounts) == 0 {
		t.Errorf("%+v", container)
	}
	script.WriteString("mount -o remount,bind,ro /\nexec \"$0\" \"$@\"\n")
	args, env := container.Args, []string(nil)
	for _, e := range container.Env {
		value := e.Value
		if e.ValueFrom != nil && e.ValueFrom.FieldRef.FieldPath == "spec.nodeName" {
			value = "node-a"
		}
		env = append(env, e.Name+"="+value)
		for i, arg := range args {
			args[i] = strings.ReplaceAll(arg, "$("+e.Name+")", value)
		}
	}
	r.dir = plugin
	r.prepare()
	r.process.Args = slices.Concat([]string{"--mount", "--propagation", "unchanged", "sh", "-euc", script.String(), r.process.Program}, args)
	r.process.Program = "unshare"
	r.start(env...)
	if err := unix.Access(fmt.Sprintf("/proc/%d/root/", r.process.Pid()), unix.W_OK); !errors.Is(err, unix.EROFS) {
		t.Errorf("its root filesystem can be written to: %v", err)
	}
	registered, err := filepath.Glob(kubelet + "/crust-proxy/registry/*.sock")
	if err != nil || len(registered) != 1 {
		t.Errorf("it registers at %q: %v", registered, err)
	}
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		v := r.volume(fs, rig.MountAccess(fs))
		v.up()
		content := v.putRandom(mib)
		made := v.mustSnapshot(fs)
		if !r.consistent(made.GetSnapshotId()) {
			t.Error("the snapshot is not consistent")
		}
		restored := r.volume("restored", rig.MountAccess(fs))
		check.Must(t, restored.createFrom(snapshotSource(made.GetSnapshotId()), 2*size))
		v.down()
		restored.must(restored.stage, restored.publish) // it grows
		restored.wantRandom(content)
		restored.down()
		check.Must(t, r.removeSnapshot(made.GetSnapshotId()))
	}
	r.wantNothing()
}

// chartsDriver gives the driver's container, and the volumes of its pod.
func chartsDriver(t *testing.T, values ...string) (corev1.Container, []corev1.Volume) {
	t.Helper()
	args := []string{"--values", render.Chart() + "/ci/crust-driver-values.yaml"}
	for _, value := range values {
		args = append(args, "--set", value)
	}
	found := render.Find(t, render.Objects(t, render.Template(t, args...)), "StatefulSet", "crust-proxy-driver")
	set := &appsv1.StatefulSet{}
	check.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, set))
	pod := set.Spec.Template.Spec
	return pod.Containers[slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == "crust-driver" })], pod.Volumes
}
