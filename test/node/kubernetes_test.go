//go:build system

package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// onKubernetes is what the pages have in the configuration of a node of a cluster.
const onKubernetes = `handlers: {kata: {enabled: false}, crust: {enabled: true}}
front: {enabled: true}
cluster: {kubeconfig: /etc/kubernetes/kubelet.conf}
policy: {rules: [{name: pods in crust, runtimeHandlers: [crust], defer: true}]}`

// member is a machine that is the node of a cluster, and what runs on it.
type member struct {
	*machine
	k       *cluster.Kube
	set     *cluster.StatefulSet
	pods    []*cluster.Pod // of the set
	volumes []*cluster.Volume
	greedy  *cluster.Pod
	spare   *cluster.Volume // greedy's
}

// TestKubernetesNode takes a node of a cluster through its life: kubelet has its default settings there, systemd's control
// groups and the packages. The control plane and the sidecars are on this machine.
func TestKubernetesNode(t *testing.T) {
	n := join(t)
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"ready", n.ready}, {"pods", n.start}, {"grown", n.grown}, {"evicted by kubelet", n.evicted}, {"rebooted", n.rebooted},
		{"drained", n.drained}, {"back", n.back}, {"removed", n.removed}, {"well", n.well},
	} {
		start := time.Now()
		step.do()
		t.Logf("%s after %v", step.name, time.Since(start).Round(time.Second))
		if t.Failed() {
			return
		}
	}
}

// join boots the node of a new cluster.
func join(t *testing.T) *member {
	k, ports := cluster.Elsewhere(t)
	programs := check.Value(cluster.Programs())(t)
	files := ourFiles(t)
	files["testdata/kubernetes/."], files[filepath.Join(programs, "kubelet")] = "/etc", "/usr/local/bin/"
	files[k.NodeAccess], files[k.Dir+"/ca.crt"] = "/etc/kubernetes/kubelet.conf", "/etc/kubernetes/"
	files[rig.Program(t, "crust-driver")] = "/usr/local/bin/"
	m := install(t, "bookworm", files, "-nic", "user,model=virtio-net-pci"+
		",hostfwd=tcp:127.0.0.1:"+ports.Kubelet+"-:10250,hostfwd=tcp:127.0.0.1:"+ports.Driver+"-:10000")
	return &member{machine: m, k: k}
}

// ready installs what is ours, and waits for the node and its driver.
func (n *member) ready() {
	n.isNode()
	n.sh("dpkg -i crust-*.deb")
	n.configure(onKubernetes, "crust-runc", "cluster")
	n.sh("systemctl enable --now crust-driver kubelet")
	n.inside("images")
	n.k.Must(n.k.WaitNode(corev1.ConditionTrue))
	n.k.Must(n.k.Mend())
	n.k.StartSidecars(cluster.Native)
}

// start has a StatefulSet whose pods have an init container and two others, and a pod that takes more of the node's disk
// than it may: kubelet needs a minute to see that.
func (n *member) start() {
	mounts := []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	init, second := cluster.Container("init", "echo init >>/data/init"), cluster.Sleeper("second")
	init.VolumeMounts, second.VolumeMounts = mounts, mounts
	n.set = n.k.NewStatefulSet("set", cluster.Native, 2, func(spec *corev1.PodSpec) {
		spec.InitContainers, spec.Containers = append(spec.InitContainers, init), append(spec.Containers, second)
	})
	n.spare = n.k.NewClaim(cluster.VolumeOptions{Name: "greedy", Driver: cluster.Native})
	n.greedy = n.k.NewPod("greedy", cluster.Crust).With(n.spare, "/data").
		Script("echo greedy >/data/greedy; dd if=/dev/zero of=/scratch/zero bs=1M count=16; " + cluster.Forever)
	n.greedy.Spec.Volumes = append(n.greedy.Spec.Volumes, corev1.Volume{Name: "scratch", VolumeSource: corev1.VolumeSource{
		EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: resource.NewQuantity(8*cluster.Mib, resource.BinarySI)},
	}})
	main := &n.greedy.Spec.Containers[0]
	main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: "scratch", MountPath: "/scratch"})
	n.greedy.Create()
	n.pods = n.set.Ready()
	for _, p := range n.pods {
		n.volumes = append(n.volumes, n.set.Volume(p))
		p.Exec("echo " + p.Name + " >/data/name && sync")
	}
	n.wantData(1)
}

// wantData wants the pods to have their volumes, to which the init container has come that many times or, where a sandbox
// failed, more often, and the node's kernel to have none of them mounted.
func (n *member) wantData(times int) {
	n.k.T.Helper()
	for _, p := range n.pods {
		said, err := p.TryExec("second", fmt.Sprintf("cat /data/name && test $(wc -l </data/init) -ge %d", times))
		check.That(n.t, err == nil && said == p.Name+"\n", "pod %s reads %q: %v", p.Name, said, err)
	}
	check.Equal(n.t, n.sh("grep -e ' - xfs ' /proc/self/mountinfo || true"), "", "the node has mounted")
	check.Says(n.t, "crustctl", n.run("crustctl", "list", "--output=wide"), "BOUND")
}

// grown: a claim grows while its pod uses it.
func (n *member) grown() {
	v := n.volumes[0]
	v.Edit(2 * v.Size)
	v.WaitGrown()
	has := n.pods[0].DF("/data").Total
	check.That(n.t, has > v.Size*8/10 && has <= v.Size, "the pod has %d bytes of %d", has, v.Size)
}

// evicted: kubelet itself ends the pod that takes too much, and its volume goes although the pod's object stays.
func (n *member) evicted() {
	n.k.Eventually("kubelet evicts the pod", func(ctx context.Context) error {
		is, err := n.greedy.Get(ctx)
		if err == nil && (is.Status.Phase != corev1.PodFailed || is.Status.Reason != "Evicted") {
			err = fmt.Errorf("it is %s: %s %v", is.Status.Phase, is.Status.Reason, n.greedy.Events())
		}
		return err
	})
	n.gone("volume of the pod", "ls -d /var/lib/kubelet/pods/"+string(n.greedy.UID)+"/volumes/kubernetes.io~csi/*")
	n.greedy.Delete()
}

// gone waits until a script in the machine says nothing more.
func (n *member) gone(what, script string) {
	n.k.T.Helper()
	n.k.Eventually(what+" is gone", func(context.Context) error {
		if left := n.sh("{ " + script + "; } 2>/dev/null || true"); left != "" {
			return errors.New(left)
		}
		return nil
	})
}

// rebooted: the same pods come back with their data.
func (n *member) rebooted() {
	before := make(map[types.UID]int32)
	for _, p := range n.pods {
		is, err := p.Get(n.t.Context())
		n.k.Must(err)
		before[is.UID] = restarts(is)
	}
	n.reboot()
	for _, p := range n.pods {
		n.k.Eventually("pod "+p.Name+" runs again", func(ctx context.Context) error {
			is, err := p.Get(ctx) // it is the same one
			if err != nil {
				return err
			}
			if now := restarts(is); now < before[is.UID]+int32(len(is.Status.ContainerStatuses)) { //nolint:gosec // two
				return fmt.Errorf("its containers began anew %d times; %v", now, p.Events())
			}
			for _, c := range is.Status.ContainerStatuses {
				if !c.Ready {
					return fmt.Errorf("%+v; %v", c, p.Events())
				}
			}
			return nil
		})
	}
	n.k.Must(n.k.Mend()) // the sidecars had lost their driver
	n.wantData(2)
}

func restarts(pod *corev1.Pod) (all int32) {
	for _, c := range pod.Status.ContainerStatuses {
		all += c.RestartCount
	}
	return all
}

// drained: pods are evicted by the API, and leave nothing on the node. The set's next ones find none.
func (n *member) drained() {
	n.k.Must(check.Err(n.k.Kubectl("drain", cluster.NodeName, "--timeout="+cluster.Patience.String())))
	n.wantEmpty()
}

// wantEmpty wants nothing to be left on the node of pods and their volumes but what the driver keeps.
func (n *member) wantEmpty() {
	n.k.T.Helper()
	n.gone("all", `ls -d /var/lib/kubelet/pods/* /run/crust/* /run/crust-proxy/state/*/*.json
losetup --noheadings --list
grep -e /var/lib/kubelet/ -e /run/crust/ /proc/self/mountinfo
find /sys/fs/cgroup/kubepods.slice -name '*-pod*.slice'`)
	check.Says(n.t, "crustctl list", n.run("crustctl", "list"), "No volumes")
}

// back: other pods come, with the data.
func (n *member) back() {
	n.k.Must(check.Err(n.k.Kubectl("uncordon", cluster.NodeName)))
	n.pods = n.set.Ready(n.pods...)
	n.wantData(3)
}

// removed: claims go with their pods, and volumes with their claims.
func (n *member) removed() {
	n.k.Must(errors.Join(n.set.Remove(), n.spare.RemoveClaim()))
	for _, v := range n.volumes {
		n.k.Must(v.WaitRemoved())
	}
	n.gone("all that the driver has", "ls -d /var/lib/crust-driver/volumes/*")
	n.wantEmpty()
}

func (n *member) well() {
	check.Says(n.t, "doctor", n.run("crustctl", "doctor", "--wait", "3m"), " ok, 0 warnings, 0 errors")
	n.wantNoneKilled()
}
