package show

import (
	"cmp"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Size shows bytes with a binary unit: 1.5GiB.
func Size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	value, unit := float64(n), -1
	// 1023.95 and more would be shown as 1024.0 of a unit.
	for value >= 1023.95 && unit < 5 {
		value, unit = value/1024, unit+1
	}
	return strings.Replace(fmt.Sprintf("%.1f%ciB", value, "KMGTPE"[unit]), ".0", "", 1)
}

// ShortIDLength is how much of an id is shown to people.
const ShortIDLength = 12

// ShortID is the part of an id that is shown to people.
func ShortID(id string) string { return id[:min(len(id), ShortIDLength)] }

// When returns a value if the condition is true, else its type's zero value.
func When[T any](is bool, value T) (none T) { return Either(is, value, none) }

// Either returns one of two values.
func Either[T any](is bool, yes, no T) T {
	if is {
		return yes
	}
	return no
}

// Joined joins the texts that are not empty.
func Joined(separator string, texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(text string) bool { return text == "" }), separator)
}

// WithDetail adds a detail in brackets, if there is one.
func WithDetail(what, detail string) string {
	return Joined(" ", what, When(detail != "", "("+detail+")"))
}

// Percent is the used part of a total, rounded up, so that it is 0% only if nothing is used.
// Without a total it is empty.
func Percent(used, total int64) string {
	if total <= 0 {
		return ""
	}
	return fmt.Sprintf("%.0f%%", math.Ceil(100*float64(used)/float64(total)))
}

// Duration formats how long ago something was, as kubectl does: coarser as it grows. It is 0s
// if our clock is behind the daemon's.
func Duration(d time.Duration) string { return duration.HumanDuration(max(0, d)) }

// Colours and attributes: the terminal's own sixteen, so that the user's palette applies.
const (
	Plain   = ""
	Red     = "\x1b[31m"
	Green   = "\x1b[32m"
	Yellow  = "\x1b[33m"
	Cyan    = "\x1b[36m"
	Faint   = "\x1b[2m"
	Bold    = "\x1b[1m"
	Reverse = "\x1b[7m"
	Alarm   = "\x1b[1;31m"
	Reset   = "\x1b[0m"
)

// StateName is the name of a volume's state; a volume that is gone has none.
func StateName(s adminv1.VolumeState) string {
	return When(s != adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED, strings.TrimPrefix(s.String(), "VOLUME_STATE_"))
}

// StateNames are the states' names as users write them.
func StateNames() (names []string) {
	for n := int32(1); adminv1.VolumeState_name[n] != ""; n++ {
		names = append(names, strings.ToLower(StateName(adminv1.VolumeState(n))))
	}
	return names
}

// CheckStates checks the values of --state.
func CheckStates(states ...string) error {
	for _, state := range states {
		if !slices.Contains(StateNames(), strings.ToLower(state)) {
			return fmt.Errorf("--state %q is none of %s", state, strings.Join(StateNames(), ", "))
		}
	}
	return nil
}

// Pod names the pod of a volume, by its UID if its name is not known.
func Pod(v *adminv1.Volume) string {
	return Either(v.GetPodName() != "", v.GetPodNamespace()+"/"+v.GetPodName(), v.GetPodUid())
}

// podDigits is how much of a pod's UID is shown where its name is not known. crustctl takes it for a name.
const podDigits = 8

// ShortPod is Pod for a column.
func ShortPod(v *adminv1.Volume) string {
	return Either(v.GetPodName() != "", Pod(v), v.GetPodUid()[:min(len(v.GetPodUid()), podDigits)])
}

// VolumeName names a volume by its claim, if that is known, else by its PersistentVolume, and else
// by the driver's id or the last part of the path.
func VolumeName(v *adminv1.Volume) string {
	return cmp.Or(v.GetPvcName(), kubelet.VolumeName(v.GetTargetPath()), v.GetVolumeId(), path.Base(v.GetTargetPath()))
}

var stateColours = map[adminv1.VolumeState]string{
	adminv1.VolumeState_VOLUME_STATE_BOUND:    Green,
	adminv1.VolumeState_VOLUME_STATE_DEGRADED: Red,
	adminv1.VolumeState_VOLUME_STATE_REFUSED:  Red,
	adminv1.VolumeState_VOLUME_STATE_HELD:     Red,
	adminv1.VolumeState_VOLUME_STATE_REMOVING: Yellow,
	adminv1.VolumeState_VOLUME_STATE_ADOPTED:  Faint,
}

// StateColour is the colour of a volume's state; other states are plain.
func StateColour(s adminv1.VolumeState) string { return stateColours[s] }

// Usage is one measure of a volume's filesystem; nil is unknown.
func Usage(v *adminv1.Volume, unit adminv1.VolumeUsage_Unit) *adminv1.VolumeUsage {
	for _, u := range v.GetUsage() {
		if u.GetUnit() == unit {
			return u
		}
	}
	return nil
}
