package api

import (
	"context"
	"regexp"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

// Node is what both servers speak for: the volumes of this node, those of the
// broker and those that other programs published.
type Node struct {
	Broker   *deferral.Broker
	Handlers map[string]runtime.Handler
	Relay    *stats.Relay
	// Refusals are the volumes that were refused; nil where the front is off.
	Refusals Refusals
}

// Refusals are volumes that pods wait for and that are not on record.
type Refusals interface {
	Refused() []deferral.Refusal
	Refusal(key deferral.Key) (deferral.Refusal, bool)
}

// idForm is a key or the beginning of one.
var idForm = regexp.MustCompile(`^[0-9a-f]{6,64}$`)

// byTarget finds a volume by its target path.
func (n *Node) byTarget(path string) (deferral.Status, error) {
	key, err := n.Broker.KeyOfTarget(path)
	if err != nil {
		return deferral.Status{}, err
	}
	if status, ok := n.byKey(key); ok {
		return status, nil
	}
	return deferral.Status{}, deferral.Errorf(deferral.NotFound,
		"volume %s is unknown to crust-proxy: it was not staged, or was unstaged", path)
}

// byKey finds a volume by its key.
func (n *Node) byKey(key deferral.Key) (deferral.Status, bool) {
	if status, ok := n.Broker.Get(key); ok {
		return status, true
	}
	for _, v := range n.adopted() {
		if v.Key == key {
			return deferral.Status{Volume: v}, true
		}
	}
	return deferral.Status{}, false
}

// byReference finds a volume by target path, id, or a beginning of an id that
// fits one volume only.
func (n *Node) byReference(ref string) (deferral.Status, error) {
	if strings.HasPrefix(ref, "/") {
		return n.shownByTarget(ref)
	}
	if !idForm.MatchString(ref) {
		return deferral.Status{}, deferral.Errorf(deferral.Invalid,
			"%.80q names no volume: give a target path, an id, or the first 6 digits or more of one", ref)
	}
	var found []deferral.Status
	for _, status := range n.Shown() {
		if strings.HasPrefix(string(status.Key), ref) {
			found = append(found, status)
		}
	}
	switch len(found) {
	case 0:
		return deferral.Status{}, deferral.Errorf(deferral.NotFound, "no volume has an id that begins with %s", ref)
	case 1:
		return found[0], nil
	default:
		return deferral.Status{}, deferral.Errorf(deferral.Invalid,
			"%d volumes have an id that begins with %s: give more digits", len(found), ref)
	}
}

// List gives all volumes, ordered by target.
func (n *Node) List() []deferral.Status {
	all := n.Broker.List()
	adopted := n.adopted()
	if len(adopted) == 0 {
		return all
	}
	for _, v := range adopted {
		if _, ours := n.Broker.Get(v.Key); !ours {
			all = append(all, deferral.Status{Volume: v})
		}
	}
	slices.SortFunc(all, func(x, y deferral.Status) int { return strings.Compare(x.Target, y.Target) })
	return all
}

// Shown gives all volumes and those that were refused, ordered by target.
func (n *Node) Shown() []deferral.Status {
	all := n.List()
	if n.Refusals == nil {
		return all
	}
	refused := n.Refusals.Refused()
	if len(refused) == 0 {
		return all
	}
	for i := range refused {
		if _, there := n.byKey(refused[i].Key); !there {
			all = append(all, refused[i].Status())
		}
	}
	slices.SortFunc(all, func(x, y deferral.Status) int { return strings.Compare(x.Target, y.Target) })
	return all
}

// shownByKey finds a volume, or one that was refused.
func (n *Node) shownByKey(key deferral.Key) (deferral.Status, bool) {
	if status, ok := n.byKey(key); ok || n.Refusals == nil {
		return status, ok
	}
	if refusal, ok := n.Refusals.Refusal(key); ok {
		return refusal.Status(), true
	}
	return deferral.Status{}, false
}

// shownByTarget finds a volume by its target path, or one that was refused by its
// target or staging path.
func (n *Node) shownByTarget(path string) (deferral.Status, error) {
	found, err := n.byTarget(path)
	if err == nil || n.Refusals == nil {
		return found, err
	}
	for _, refusal := range n.Refusals.Refused() {
		if refusal.Target == path {
			return refusal.Status(), nil
		}
	}
	return found, err
}

func (n *Node) adopted() []*deferral.Volume {
	var all []*deferral.Volume
	for _, handler := range n.Handlers {
		all = append(all, handler.Adopted()...)
	}
	return all
}

func (n *Node) handlerOf(v *deferral.Volume) (runtime.Handler, error) {
	handler := n.Handlers[v.Handler]
	if handler == nil {
		return nil, deferral.Errorf(deferral.Unsupported,
			"volume %s: its runtime handler %q is not configured any more", v.Target, v.Handler)
	}
	return handler, nil
}

func (n *Node) binding(v *deferral.Volume) (runtime.Binding, bool) {
	handler := n.Handlers[v.Handler]
	if handler == nil {
		return runtime.Binding{}, false
	}
	return handler.Binding(v)
}

// stats asks the sandbox of a volume.
func (n *Node) stats(ctx context.Context, v *deferral.Volume) (stats.Answer, error) {
	handler, err := n.handlerOf(v)
	if err != nil {
		return stats.Answer{}, err
	}
	return n.Relay.Stats(ctx, handler, v)
}

// expand asks the sandbox of a volume to grow.
func (n *Node) expand(ctx context.Context, v *deferral.Volume, wish deferral.Range) (int64, error) {
	handler, err := n.handlerOf(v)
	if err != nil {
		return 0, err
	}
	if v.ReadOnly {
		return 0, deferral.Errorf(deferral.Invalid, "volume %s is read-only: its filesystem cannot grow", v.Target)
	}
	size, err := n.Relay.Expand(ctx, handler, v, wish)
	if deferral.KindOf(err) == deferral.NoSandbox && err != nil && !v.Adopted && n.Broker.Abilities(v.Handler).GrowsAtMount {
		return n.growLater(ctx, v, wish)
	}
	return size, err
}

// growLater answers where no sandbox has the volume and the next one grows its
// filesystem when it mounts it. kubelet expands a volume before its pod has a
// sandbox, and starts no pod after an error.
func (n *Node) growLater(ctx context.Context, v *deferral.Volume, wish deferral.Range) (int64, error) {
	size, known := n.Broker.DeviceSize(v)
	if !known {
		return 0, deferral.Errorf(deferral.Internal, "volume %s: the size of its device %s cannot be told", v.Target, v.Device.Path)
	}
	if size < wish.Required || wish.Limit > 0 && size > wish.Limit {
		return 0, deferral.Errorf(deferral.OutOfRange, "volume %s: its device %s has %d bytes, and %d to %d are asked for (0 is no limit): "+
			"the driver grows the device first", v.Target, v.Device.Path, size, wish.Required, wish.Limit)
	}
	return size, n.Broker.GrowAtMount(ctx, v.Key, size)
}
