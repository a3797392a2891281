//go:build system

package front

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// crustctl runs it at the node's daemon.
func (n *node) crustctl(args ...string) string {
	n.t.Helper()
	out, err := exec.Command(rig.Program(n.t, "crustctl"), append([]string{"--socket", n.AdminSocket}, args...)...).CombinedOutput()
	if err != nil {
		n.t.Errorf("crustctl %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// TestOperatorSeesWhatWasRefused with the rule, the handler and who said no, until
// it goes right.
func TestOperatorSeesWhatWasRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 16*mib)
	v.Context = map[string]string{
		"csi.storage.k8s.io/pod.namespace": "team", "csi.storage.k8s.io/pod.name": "db-0",
	}
	check.Must(t, n.stage(v))
	watch, err := n.Admin().WatchVolumes(t.Context(), &adminv1.WatchVolumesRequest{})
	check.Must(t, err)
	next := func() *adminv1.WatchVolumesResponse {
		t.Helper()
		event, err := watch.Recv()
		check.Must(t, err)
		return event
	}
	if e := next(); e.GetType() != adminv1.WatchVolumesResponse_TYPE_SYNCED {
		t.Errorf("got %v", e)
	}
	v.FS = "vfat" // which no handler takes
	target := v.TargetOf("pod-1")
	for range 3 {
		check.Code(t, n.publish(v, "pod-1"), codes.Unimplemented, "volume "+target+" of pod team/db-0: ", "vfat")
	}
	if got := next().GetVolume(); got.GetState() != adminv1.VolumeState_VOLUME_STATE_REFUSED || got.GetTargetPath() != target {
		t.Errorf("watched: %v", got)
	}
	if said := n.crustctl("get"); !strings.Contains(said, "REFUSED (handler)") || !strings.Contains(said, target) {
		t.Errorf("crustctl get says\n%s", said)
	}
	said := n.crustctl("get", target)
	for _, word := range []string{"REFUSED (handler)", `rule "all"`, "kata", "team/db-0", "handler (3 times)", "vfat", v.ID} {
		if !strings.Contains(said, word) {
			t.Errorf("crustctl get does not say %q:\n%s", word, said)
		}
	}
	metrics, err := n.HTTP("/metrics")
	check.Must(t, err)
	for _, line := range []string{
		`crust_proxy_refusals_total{driver="` + driverName + `",party="handler"} 3`,
		`crust_proxy_volumes{driver="` + driverName + `",handler="kata",state="refused"} 1`,
	} {
		if !strings.Contains(metrics, line) {
			t.Errorf("no metric %s", line)
		}
	}
	v.FS = "ext4"
	check.Must(t, n.publish(v, "pod-1"))
	if said := n.crustctl("get", target); strings.Contains(said, "efused") || !strings.Contains(said, "PUBLISHED") || !strings.Contains(said, "team/db-0") {
		t.Errorf("after a success crustctl get says\n%s", said)
	}
	check.Code(t, n.publish(v, "pod-2"), codes.FailedPrecondition, "published for the pod team/db-0")
	if said := n.crustctl("list", "--state", "refused"); !strings.Contains(said, "REFUSED (volume)") || strings.Contains(said, target) {
		t.Errorf("crustctl list says\n%s", said)
	}
	check.Must(t, n.unpublish(v, "pod-2")) // its pod was deleted
	if said := n.crustctl("list", "--state", "refused"); !strings.Contains(said, "No volumes") {
		t.Errorf("crustctl list says\n%s", said)
	}
	check.Must(t, n.unpublish(v, "pod-1"))
	check.Must(t, n.unstage(v))

	v.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	check.Code(t, n.stage(v), codes.Unimplemented, "volume "+v.Staging+": ", "several nodes write")
	if said := n.crustctl("get", v.Staging); !strings.Contains(said, "REFUSED (volume)") {
		t.Errorf("crustctl get says\n%s", said)
	}
	n.remove(v)
	n.wantClean()
}
