package admin

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// idForm matches a key or a prefix of one.
var idForm = regexp.MustCompile(`^[0-9a-f]{6,64}$`)

// byReference finds the only volume that a reference names. A target path and a whole id name one
// volume, whatever others are called: anybody may name a pod. Of several volumes none is chosen.
func (n *Node) byReference(ref string) (deferral.Status, error) {
	if ref == "" {
		return deferral.Status{}, volume.Errorf(volume.Invalid, "the name of a volume is missing")
	}
	unknown := error(nil)
	if strings.HasPrefix(ref, "/") { // so do the volume ids of some drivers
		var found deferral.Status
		if found, unknown = n.byTarget(ref, n.shownByKey); unknown == nil {
			return found, nil
		}
	}
	if found, ok := n.shownByKey(volume.Key(ref)); ok {
		return found, nil
	}
	var found []deferral.Status
	for status := range n.EachShown() {
		if unknown != nil && status.Refused && status.Target == ref { // a refused one may have a staging path
			return status, nil
		}
		if isNamed(status.Volume, ref) {
			found = append(found, status)
		}
	}
	switch len(found) {
	case 0:
		return deferral.Status{}, cmp.Or(unknown, volume.Errorf(volume.NotFound, "no volume, pod or claim with a deferred volume is called %.80q", ref))
	case 1:
		return found[0], nil
	default:
		return deferral.Status{}, n.ambiguous(ref, found)
	}
}

// shownOfUID is how much of a pod's UID crustctl shows.
const shownOfUID = 8

// isNamed reports whether a reference is a name of the volume, of its pod or of its claim, or
// the beginning of its id or of its pod's UID.
func isNamed(v *volume.Volume, ref string) bool {
	switch {
	case idForm.MatchString(ref) && strings.HasPrefix(string(v.Key), ref), ref == v.PodUID, ref == kubelet.VolumeName(v.Target):
		return true
	case len(ref) >= shownOfUID && strings.HasPrefix(v.PodUID, ref):
		return true
	}
	of := v.Origin
	if of == nil {
		return false
	}
	named := func(name string) bool {
		return name != "" && (ref == name || ref == of.PodNamespace+"/"+name)
	}
	return ref == of.VolumeID || named(of.PodName) || named(of.PVC)
}

const mostNamed = 20

func (n *Node) ambiguous(ref string, found []deferral.Status) error {
	deferral.SortByTarget(found)
	text := ""
	for _, status := range found[:min(len(found), mostNamed)] {
		v := n.message(status)
		text += fmt.Sprintf("\n  %s  pod %s, volume %s, device %s, %s", v.GetId(),
			cmp.Or(strings.TrimPrefix(v.GetPodNamespace()+"/"+v.GetPodName(), "/"), v.GetPodUid(), "unknown"),
			cmp.Or(v.GetPvcName(), kubelet.VolumeName(v.GetTargetPath()), v.GetVolumeId(), "unknown"), cmp.Or(v.GetDevice(), "unknown"), n.StateOf(status))
	}
	if more := len(found) - mostNamed; more > 0 {
		text += fmt.Sprintf("\n  and %d more", more)
	}
	return volume.Errorf(volume.Invalid, "%.80q names %d volumes; give the id of one:%s", ref, len(found), text)
}
