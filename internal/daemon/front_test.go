package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestRootOfANewFilesystem: what kubelet would do for fsGroup is done at mkfs.
func TestRootOfANewFilesystem(t *testing.T) {
	for _, c := range []struct {
		group string
		mode  uint32
		want  mkfs.Root
	}{
		{"", 0, mkfs.Root{}},
		{"", 0o777, mkfs.Root{Mode: 0o777}},
		{"2000", 0, mkfs.Root{Group: 2000, Mode: 0o2775}},
		{"2000", 0o700, mkfs.Root{Group: 2000, Mode: 0o2770}},
		{"0", 0, mkfs.Root{}},
		{"4294967294", 0, mkfs.Root{Group: 4294967294, Mode: 0o2775}},
	} {
		check.Equal(t, rootOf(c.group, c.mode), c.want, "group %q, mode %o", c.group, c.mode)
	}
}

// TestUnreadableCSINodeIsAFinding, unless the API server is away: that is a finding of its own.
func TestUnreadableCSINodeIsAFinding(t *testing.T) {
	look := pods.State{CSINode: errors.New("the CSINode node-a may not be read")}
	got := csiNodeFindings(look)
	check.That(t, len(got) == 1 && strings.Contains(got[0], look.CSINode.Error()), "got %q", got)
	look.Problems = []string{"away"}
	got = slices.Concat(csiNodeFindings(look), csiNodeFindings(pods.State{}))
	check.That(t, len(got) == 0, "got %q", got)
}

func TestIdentityInTheCluster(t *testing.T) {
	c := config.Cluster{Kubeconfig: "/etc/kubernetes/kubelet.conf", NodeName: "node-1"}
	identity := identityOf(c)
	name, err := c.Node()
	check.That(t, err == nil && name == "node-1" && identity.Kubeconfig == c.Kubeconfig && !identity.InCluster &&
		strings.HasPrefix(identity.UserAgent, "crust-proxy/"), "%+v, %q, %v", identity, name, err)
	c.NodeName = ""
	host := check.Value(apiserver.NodeName())(t)
	name, err = c.Node()
	check.That(t, err == nil && name == host, "got %q, %v; want %q", name, err, host)
}

// TestWithoutAClusterThereIsNoSourceOfPods: an interface around a nil pointer would be one.
func TestWithoutAClusterThereIsNoSourceOfPods(t *testing.T) {
	cfg := config.Default()
	for name, change := range map[string]func(){"off": func() {}, "front off": func() { cfg.Cluster.Kubeconfig = "/k" }} {
		change()
		cluster, err := newCluster(&cfg, nil, nil)
		check.That(t, err == nil && podSource(cluster) == nil && (&daemon{cluster: cluster}).remarks() == nil, "%s: %v, %v", name, err, cluster)
	}
}

func TestTheConfigurationSaysWhoTellsOfSandboxes(t *testing.T) {
	cfg := config.Default()
	tracker := newTracker(&cfg, sandbox.Config{}, zap.NewNop())
	check.That(t, strings.HasPrefix(tracker.LastError().Error(), "containerd at "), "by default it is %v", tracker.LastError())
	cfg.Containerd.Socket = ""
	tracker = newTracker(&cfg, sandbox.Config{}, zap.NewNop())
	check.That(t, tracker == nil, "nobody is configured, and there is %T", tracker)
	cfg.CRI.Socket = "/run/crio/crio.sock"
	tracker = newTracker(&cfg, sandbox.Config{}, zap.NewNop())
	check.Fails(t, tracker.LastError(), "the container runtime at /run/crio/")
}

// TestWhatAPodIsTold: refusals, repairs and bad ends of volumes whose pod is known, and of what repeats not every time.
func TestWhatAPodIsTold(t *testing.T) {
	var told []string
	observe := podObserver(func(e pods.Event) {
		told = append(told, fmt.Sprintf("%s/%s %s %v %s %s %d", e.Namespace, e.Pod, e.UID, e.Warning, e.Reason, e.Text, e.Count))
	})
	for n := range int64(9) {
		observe(&adminv1.VolumeEvent{What: "refused", Failed: true, Count: n + 1, PodNamespace: "shop", PodName: "db-0", PodUid: "0f0e", Text: "no"})
	}
	observe(&adminv1.VolumeEvent{What: "repaired", Count: 1, PodNamespace: "shop", PodName: "db-0", PodUid: "0f0e", Text: "claim device"})
	for _, what := range []string{"unpublish failed", "left with errors", "ended", "end failed"} {
		observe(&adminv1.VolumeEvent{What: what, Count: 1, PodNamespace: "shop", PodName: "db-0", PodUid: "0f0e"})
	}
	observe(&adminv1.VolumeEvent{What: "published", Count: 1, PodNamespace: "shop", PodName: "db-0", PodUid: "0f0e"})
	observe(&adminv1.VolumeEvent{What: "refused", Count: 1, PodUid: "0f0e"})
	const of = "shop/db-0 0f0e "
	want := []string{of + "true VolumeRefused no 1", of + "true VolumeRefused no 2", of + "true VolumeRefused no 4", of + "true VolumeRefused no 8",
		of + "false VolumeRepaired claim device 1", of + "false VolumeReleaseFailed  1", of + "false VolumeLeftWithErrors  1",
		of + "false VolumeOrphanEnded  1", of + "false VolumeOrphanStays  1"}
	check.That(t, slices.Equal(told, want), "got %q, want %q", told, want)
}
