//go:build system

package front

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestEventsOfAVolume: its whole life is told, also after a kill of the daemon and after the volume has gone, and no
// secret.
func TestEventsOfAVolume(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll)
	v := n.create("pv-1", "ext4", 400*mib)
	v.Secrets = map[string]string{"passphrase": "hunter2xyz"}
	check.Must(t, n.stage(v))
	n.up(v, "pod-1")
	check.Must(t, n.publish(v, "pod-1")) // kubelet repeats it
	sandbox := n.boot("sandbox-1", v, "pod-1")
	_, err := n.stats(v, "pod-1")
	check.Must(t, err)
	for range 3 {
		check.Code(t, n.publish(v, "pod-2"), codes.FailedPrecondition, "wait until the other pod is gone")
	}
	check.Code(t, n.unpublish(v, "pod-1"), codes.Aborted)
	file := path.Join(n.Dir, "run/state/events.pb")
	check.Eventually(t, "the events are written", func() bool {
		raw, _ := os.ReadFile(file)
		return strings.Contains(string(raw), "unpublish failed")
	})
	n.Kill()
	n.Start()
	n.waitServed()
	n.end(sandbox)
	check.Must(t, n.unpublish(v, "pod-1"))
	n.down(v, "pod-2")
	n.wantClean()
	var told []string
	got, err := n.Admin().ListEvents(t.Context(), &adminv1.ListEventsRequest{Volume: v.ID})
	check.Must(t, err)
	for _, e := range slices.Backward(got.GetEvents()) {
		told = append(told, fmt.Sprintf("%d %s by %s", e.GetCount(), e.GetWhat(), e.GetBy()))
		check.That(t, e.GetDriver() == driverName && e.GetVolumeId() == v.ID, "an event is of another volume: %v", e)
	}
	want := []string{
		"1 staged by kubelet", "1 published by kubelet", "1 bound by sandbox", "3 refused by kubelet", "1 unpublish failed by kubelet",
		"1 unbound by sandbox", "1 unpublished by kubelet", "1 unpublished by kubelet", "1 unstaged by kubelet",
	}
	if told = slices.DeleteFunc(told, func(text string) bool { return strings.Contains(text, "repair") }); !slices.Equal(told, want) {
		t.Errorf("told was\n%s\nwant\n%s", strings.Join(told, "\n"), strings.Join(want, "\n"))
	}
	for _, name := range []string{v.TargetOf("pod-1"), v.Name, "pod-1"} {
		if other, err := n.Admin().ListEvents(t.Context(), &adminv1.ListEventsRequest{Volume: name}); err != nil || len(other.GetEvents()) != len(got.GetEvents()) {
			t.Errorf("%s has %d events, %v", name, len(other.GetEvents()), err)
		}
	}
	out, err := n.Crustctl("events", v.TargetOf("pod-1")).Output()
	if check.Must(t, err); !strings.Contains(string(out), "sandbox-1 kata-go") {
		t.Errorf("crustctl shows\n%s", out)
	}
	raw, err := os.ReadFile(file)
	if check.Must(t, err); strings.Contains(string(raw)+string(out), "hunter2xyz") {
		t.Error("the secret is in the events")
	}
}
