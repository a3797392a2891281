package admin

import (
	"context"
	"iter"
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

// adopted returns the volumes that other programs published.
func (n *Node) adopted() (found []deferral.Status) {
	for _, v := range n.Sandboxes.Adopted() {
		if _, ours := n.Broker.Get(v.Key); !ours {
			found = append(found, deferral.Status{Volume: v})
		}
	}
	return found
}

// Each yields all volumes, in no order.
func (n *Node) Each() iter.Seq[deferral.Status] { return both(n.Broker.Each(), n.adopted()) }

// EachShown yields all volumes, the refused ones, and those that are not on record and whose device some process has
// open, in no order.
func (n *Node) EachShown() iter.Seq[deferral.Status] { return both(n.Broker.Each(), n.others()) }

// Shown returns the volumes of EachShown, ordered by target.
func (n *Node) Shown() []deferral.Status { return merged(slices.Collect(n.Broker.Each()), n.others()) }

func (n *Node) count(all iter.Seq[deferral.Status], into *adminv1.GetNodeResponse) {
	into.VolumesByState = make(map[string]int64)
	for status := range all {
		into.VolumesByState[n.StateOf(status)]++
		if status.Held != nil && status.Held.Forced {
			into.VolumesReleasedByForce++
		}
	}
}

func both(first iter.Seq[deferral.Status], others []deferral.Status) iter.Seq[deferral.Status] {
	return func(yield func(deferral.Status) bool) {
		for status := range first {
			if !yield(status) {
				return
			}
		}
		slices.Values(others)(yield)
	}
}

// others returns the volumes of Shown that the broker does not have.
func (n *Node) others() []deferral.Status {
	others := n.adopted()
	known := make(map[volume.Key]bool)
	for _, status := range others {
		known[status.Key] = true
	}
	add := func(status deferral.Status) {
		if _, ours := n.Broker.Get(status.Key); !ours && !known[status.Key] {
			known[status.Key] = true
			others = append(others, status)
		}
	}
	if n.Refusals != nil {
		for _, one := range n.Refusals.Refused() {
			add(statusOfRefusal(&one))
		}
	}
	for _, one := range n.Broker.Users().Held() {
		add(deferral.HeldStatus(one))
	}
	return others
}

// merged orders all volumes, each once: one of the others may have come on record meanwhile.
func merged(ordered, others []deferral.Status) []deferral.Status {
	if len(others) == 0 {
		return ordered
	}
	all := slices.Concat(ordered, others)
	slices.SortStableFunc(all, deferral.ByTarget)
	return slices.CompactFunc(all, func(x, y deferral.Status) bool { return x.Key == y.Key })
}

// selected returns the first volumes behind another one, in order, and whether there are more. It does not look at all
// for each page.
func (n *Node) selected(req *adminv1.ListVolumesRequest, behind deferral.Status, size int) ([]deferral.Status, bool) {
	return page{n.Broker.After, n.others(), func(status deferral.Status) bool { return n.selects(req, status) }}.of(behind, size)
}

// page selects from the volumes on record, which it asks for in parts, and from others.
type page struct {
	after   func(behind deferral.Status, most int) []deferral.Status
	others  []deferral.Status
	selects func(deferral.Status) bool
}

func (p page) of(behind deferral.Status, size int) (found []deferral.Status, more bool) {
	for {
		part := p.after(behind, size+1)
		last := len(part) <= size
		part = merged(part, slices.DeleteFunc(slices.Clone(p.others), func(one deferral.Status) bool {
			return deferral.ByTarget(one, behind) <= 0 || !last && deferral.ByTarget(one, part[size]) > 0
		}))
		for _, status := range part {
			if !p.selects(status) {
				continue
			}
			if len(found) == size {
				return found, true
			}
			found = append(found, status)
		}
		if last {
			return found, false
		}
		behind = part[len(part)-1]
	}
}

func (n *Node) selects(req *adminv1.ListVolumesRequest, status deferral.Status) bool {
	want := req.GetState()
	return matches(status, req.GetDriver(), req.GetHandler()) &&
		(want == adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED || want == n.state(status))
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

// growLater answers while no sandbox has the volume and the next one grows the filesystem when it mounts it. kubelet
// expands a volume before its pod has a sandbox, and does not start the pod after an error.
func (n *Node) growLater(ctx context.Context, v *volume.Volume, wish volume.Range) (int64, error) {
	size, known := n.Broker.DeviceSize(v)
	if !known {
		return 0, volume.Errorf(volume.Internal, "volume %s: the size of its device %s cannot be told", v.Target, v.Device.Path)
	}
	if size < wish.Required {
		return 0, volume.Errorf(volume.OutOfRange, "volume %s: its device %s has %d bytes, and %d or more are asked for: "+
			"the driver grows the device first", v.Target, v.Device.Path, size, wish.Required)
	}
	if wish.Limit > 0 && size > wish.Limit {
		return 0, volume.Errorf(volume.OutOfRange, "volume %s: its device %s has %d bytes, more than the limit of %d", v.Target, v.Device.Path, size, wish.Limit)
	}
	return size, n.Broker.GrowAtMount(ctx, v.Key, size)
}

func statusOfRefusal(r *refusal.Refusal) deferral.Status {
	return deferral.Status{Refused: true, Volume: &volume.Volume{
		Key: r.Key, Target: r.Target, FSType: r.FSType, Handler: r.Handler, Driver: r.Driver, PodUID: r.PodUID, Created: r.First,
		Origin: &volume.Origin{VolumeID: r.VolumeID, Rule: r.Rule, AccessMode: r.AccessMode, PodNamespace: r.PodNamespace, PodName: r.PodName, PVC: r.PVC},
	}}
}
