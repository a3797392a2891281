package admin

import (
	"context"
	"fmt"
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Node holds what both servers share: the volumes of this node, those of the broker and
// those that other programs published.
type Node struct {
	Broker    *deferral.Broker
	Sandboxes *sandboxes.Sandboxes
	// Refusals holds the refused volumes; it is nil if the front is off.
	Refusals Refusals
	frozen   freezes
}

// Refusals holds the volumes that pods wait for and that are not on record.
type Refusals interface {
	Refused() []refusal.Refusal
	Refusal(key volume.Key) (refusal.Refusal, bool)
}

// byTarget finds a volume by its target path: with byKey or shownByKey.
func (n *Node) byTarget(path string, find func(volume.Key) (deferral.Status, bool)) (deferral.Status, error) {
	key, err := n.Broker.KeyOfTarget(path)
	if err != nil {
		return deferral.Status{}, err
	}
	if status, ok := find(key); ok {
		return status, nil
	}
	return deferral.Status{}, volume.Errorf(volume.NotFound,
		"volume %s is unknown to crust-proxy: it was not staged, or was unstaged", path)
}

func (n *Node) byKey(key volume.Key) (deferral.Status, bool) {
	if status, ok := n.Broker.Get(key); ok {
		return status, true
	}
	for _, v := range n.Sandboxes.Adopted() {
		if v.Key == key {
			return deferral.Status{Volume: v}, true
		}
	}
	return deferral.Status{}, false
}

// All returns all volumes, in no order.
func (n *Node) All() []deferral.Status {
	all := n.Broker.All()
	for _, v := range n.Sandboxes.Adopted() {
		if _, ours := n.Broker.Get(v.Key); !ours {
			all = append(all, deferral.Status{Volume: v})
		}
	}
	return all
}

// Shown returns all volumes, the refused ones, and those that are not on record and whose
// device some process has open, ordered by target.
func (n *Node) Shown() []deferral.Status {
	all := n.AllShown()
	deferral.SortByTarget(all)
	return all
}

// AllShown is Shown in no order, for counting.
func (n *Node) AllShown() []deferral.Status {
	all, refused, held := n.All(), n.refused(), n.Broker.Users().Held()
	if len(refused)+len(held) == 0 {
		return all
	}
	known := make(map[volume.Key]bool, len(all))
	for _, status := range all {
		known[status.Key] = true
	}
	add := func(status deferral.Status) {
		if !known[status.Key] {
			known[status.Key] = true
			all = append(all, status)
		}
	}
	for _, one := range refused {
		add(statusOfRefusal(&one))
	}
	for _, one := range held {
		add(deferral.HeldStatus(one))
	}
	return all
}

// selected returns the first volumes behind another one, in order, and whether there are more. It does not sort all for
// each page.
func (n *Node) selected(req *adminv1.ListVolumesRequest, behind *deferral.Status, size int) (found []*deferral.Status, more bool) {
	all := n.AllShown()
	for i := range all {
		status := &all[i]
		tooMany := len(found) > size && deferral.ByTarget(found[size], status) < 0
		if tooMany || deferral.ByTarget(status, behind) <= 0 || !n.selects(req, *status) {
			continue
		}
		at, _ := slices.BinarySearchFunc(found, status, deferral.ByTarget)
		found = slices.Insert(found[:min(len(found), size)], at, status)
	}
	return found[:min(len(found), size)], len(found) > size
}

func (n *Node) selects(req *adminv1.ListVolumesRequest, status deferral.Status) bool {
	want := req.GetState()
	return matches(status, req.GetDriver(), req.GetHandler()) &&
		(want == adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED || want == n.state(status))
}

func (n *Node) refused() []refusal.Refusal {
	if n.Refusals == nil {
		return nil
	}
	return n.Refusals.Refused()
}

// refusal is nil if the volume was not refused.
func (n *Node) refusal(key volume.Key) *refusal.Refusal {
	if n.Refusals != nil {
		if found, ok := n.Refusals.Refusal(key); ok {
			return &found
		}
	}
	return nil
}

// shownByKey finds one of the volumes of Shown.
func (n *Node) shownByKey(key volume.Key) (deferral.Status, bool) {
	if status, ok := n.byKey(key); ok {
		return status, ok
	}
	if refused := n.refusal(key); refused != nil {
		return statusOfRefusal(refused), true
	}
	return n.Broker.Users().OffRecord(key)
}

func (n *Node) expand(ctx context.Context, v *volume.Volume, wish volume.Range) (size int64, later bool, err error) {
	if v.ReadOnly {
		return 0, false, volume.Errorf(volume.Invalid, "volume %s is read-only: its filesystem cannot grow", v.Target)
	}
	size, err = n.Sandboxes.Expand(ctx, v, wish)
	if volume.KindOf(err) == volume.NoSandbox && err != nil && !v.Adopted && n.Broker.Abilities(v.Handler).GrowsAtMount {
		size, err = n.growLater(ctx, v, wish)
		return size, err == nil, err
	}
	return size, false, err
}

// growLater answers while no sandbox has the volume and the next one grows the filesystem
// when it mounts it. kubelet expands a volume before its pod has a sandbox, and does not
// start the pod after an error.
func (n *Node) growLater(ctx context.Context, v *volume.Volume, wish volume.Range) (int64, error) {
	size, known := n.Broker.DeviceSize(v)
	if !known {
		return 0, volume.Errorf(volume.Internal, "volume %s: the size of its device %s cannot be told", v.Target, v.Device.Path)
	}
	if size < wish.Required || wish.Limit > 0 && size > wish.Limit {
		asked := fmt.Sprintf("%d or more", wish.Required)
		if wish.Limit > 0 {
			asked = fmt.Sprintf("%d to %d", wish.Required, wish.Limit)
		}
		return 0, volume.Errorf(volume.OutOfRange, "volume %s: its device %s has %d bytes, and %s are asked for: "+
			"the driver grows the device first", v.Target, v.Device.Path, size, asked)
	}
	return size, n.Broker.GrowAtMount(ctx, v.Key, size)
}

func statusOfRefusal(r *refusal.Refusal) deferral.Status {
	return deferral.Status{Refused: true, Volume: &volume.Volume{
		Key: r.Key, Target: r.Target, FSType: r.FSType, Handler: r.Handler, Driver: r.Driver, PodUID: r.PodUID, Created: r.First,
		Origin: &volume.Origin{VolumeID: r.VolumeID, Rule: r.Rule, AccessMode: r.AccessMode, PodNamespace: r.PodNamespace, PodName: r.PodName, PVC: r.PVC},
	}}
}
