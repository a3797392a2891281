//go:build system

package kube_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	yamlv4 "go.yaml.in/yaml/v4"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestQuickStart does what docs/quick-start.md says of a cluster with crust-runc, with
// the configuration and the objects that stand there.
func TestQuickStart(t *testing.T) {
	page := readQuickStart(t)
	k := cluster.On(t)
	settings := k.DefaultProxy()
	settings.Rules = page.rules
	k.Settings(settings)
	onTheNode, inTheSandbox := page.pods["on-the-node"], page.pods["in-the-sandbox"]
	for _, pod := range []*corev1.Pod{onTheNode, inTheSandbox} {
		p := page.start(k, pod)
		check.Equal(t, p.Exec("cat /data/greeting && grep -c ' /data ext4 ' /proc/mounts"), "hello\n1\n", "%s has", p.Name)
		filesystem := mountedAt(t, filepath.Join(cluster.KubeletRoot, "pods", string(p.UID), "volumes/kubernetes.io~csi/data/mount"))
		deferred := pod == inTheSandbox
		check.That(t, strings.HasPrefix(filesystem, "tmpfs crust:") == deferred && strings.HasPrefix(filesystem, "ext4 /dev/") != deferred,
			"%s has on the node %q", p.Name, filesystem)
		p.Delete()
	}
}

// quickStart is what the page has in its section on crust-runc.
type quickStart struct {
	rules string // of the policy, in one line
	pods  map[string]*corev1.Pod
}

func readQuickStart(t *testing.T) quickStart {
	t.Helper()
	raw := check.Value(os.ReadFile("../../docs/quick-start.md"))(t)
	_, section, _ := strings.Cut(string(raw), "\n## A cluster with crust-runc\n")
	section, _, _ = strings.Cut(section, "\n## ")
	out := quickStart{pods: make(map[string]*corev1.Pod)}
	for _, found := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(section, -1) {
		if strings.HasPrefix(found[1], "# /etc/crust-proxy/config.yaml") {
			cfg, err := config.Parse([]byte(found[1]))
			check.Require(t, err == nil && cfg.Front.Enabled && cfg.Handlers.Crust.Enabled && cfg.Cluster.On(),
				"the configuration cannot be meant: %v\n%s", err, found[1])
			rules, err := yamlv4.Marshal(cfg.Policy.Rules)
			if err == nil {
				rules, err = yaml.YAMLToJSON(rules) // which fits into a line
			}
			check.Must(t, err)
			out.rules = string(rules)
			continue
		}
		for document := range strings.SplitSeq(found[1], "\n---\n") {
			out.take(t, document)
		}
	}
	check.Require(t, len(out.pods) == 2 && out.rules != "", "the page has %d pods, and the rules %s", len(out.pods), out.rules)
	return out
}

// take reads one object, and is strict about it as kubectl is.
func (q *quickStart) take(t *testing.T, document string) {
	t.Helper()
	var kind struct{ Kind string }
	err := yaml.Unmarshal([]byte(document), &kind)
	switch kind.Kind {
	case "RuntimeClass":
		class := &nodev1.RuntimeClass{}
		err = yaml.UnmarshalStrict([]byte(document), class)
		check.That(t, class.Name == cluster.Crust && class.Handler == cluster.Crust, "the runtime class is %+v", class)
	case "CSIDriver":
		err = yaml.UnmarshalStrict([]byte(document), &storagev1.CSIDriver{})
	case "Pod":
		pod := &corev1.Pod{}
		err = yaml.UnmarshalStrict([]byte(document), pod)
		q.pods[pod.Name] = pod
	default:
		t.Errorf("an object of kind %q", kind.Kind)
	}
	check.That(t, err == nil, "%v in\n%s", err, document)
}

// start makes the pod on the node that there is, with the image and the driver that are there.
func (q *quickStart) start(k *cluster.Kube, pod *corev1.Pod) *cluster.Pod {
	class := ""
	if pod.Spec.RuntimeClassName != nil {
		class = *pod.Spec.RuntimeClassName
	}
	p := k.NewPod(pod.Name, class)
	p.Spec.Containers, p.Spec.Volumes = pod.Spec.Containers, pod.Spec.Volumes
	p.Spec.Containers[0].Image, p.Spec.Containers[0].ImagePullPolicy = cri.BusyboxImage, corev1.PullNever
	p.Spec.Volumes[0].CSI.Driver = cluster.Native
	return p.Start()
}

// mountedAt gives filesystem and source of what is mounted on the node at a path.
func mountedAt(t *testing.T, path string) string {
	t.Helper()
	mounts := check.Value(os.ReadFile("/proc/self/mountinfo"))(t)
	for line := range strings.Lines(string(mounts)) {
		if _, rest, found := strings.Cut(line, " "+path+" "); found {
			_, filesystem, _ := strings.Cut(rest, " - ")
			return filesystem
		}
	}
	return ""
}
