package pods

import (
	"strings"
	"testing"

	"go.uber.org/zap"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func TestDriversOfTheCSINode(t *testing.T) {
	f := newFakeAPI(t)
	c := start(t, f, hasty)
	synced(t, c)
	fails := func(kind volume.Kind, words ...string) {
		t.Helper()
		got, err := c.NodeDrivers(t.Context())
		refused(t, err, kind, words...)
		if got != nil || c.State().CSINode == nil || !strings.Contains(c.State().CSINode.Error(), err.Error()) {
			t.Errorf("got %v, and the state says %v", got, c.State().CSINode)
		}
	}
	fails(volume.Busy, "the CSINode "+thisNode, "does not exist")
	f.put(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: thisNode}, Spec: storagev1.CSINodeSpec{
		Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: "n"}},
	}})
	got, err := c.NodeDrivers(t.Context())
	if err != nil || len(got) != 1 || !got[driver] || c.State().CSINode != nil {
		t.Errorf("got %v, %v; the state says %v", got, err, c.State().CSINode)
	}
	f.setRefused("get csinodes", 403)
	fails(volume.Busy, "may not be read by our identity")
	f.setAway(true)
	fails(volume.Timeout, "cannot be reached", f.server.URL)
	if n := f.count("list csinodes") + f.count("watch csinodes"); n != 0 {
		t.Errorf("a right was asked for that a node does not have: %d times", n)
	}
}

// TestCSINodeBeforeTheFirstContact: that nobody was asked is no empty list.
func TestCSINodeBeforeTheFirstContact(t *testing.T) {
	c := New(Config{NodeName: thisNode, Log: zap.NewNop()})
	_, err := c.NodeDrivers(t.Context())
	refused(t, err, volume.Timeout, "no API server was asked yet")
}
