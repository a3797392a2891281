package ctl

import (
	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// shortID is how much of an id is shown to people.
const shortID = 12

func short(id string) string {
	if len(id) > shortID {
		return id[:shortID]
	}
	return id
}

func (a *app) volumeHeading() []string {
	heading := []string{"ID", "STATE", "DRIVER", "HANDLER", "DEVICE", "SANDBOX", "USED", "SIZE", "AGE"}
	if a.output == formatWide {
		heading = append(heading, "IDENTITY", "FS", "ACCESS", "POD", "USAGE AGE", "LAST ERROR")
	}
	return append(heading, "TARGET")
}

func (a *app) volumeRow(v *adminv1.Volume) []cell {
	used, total := usedOf(v)
	row := []cell{
		text(short(v.GetId())), stateCell(v), text(v.GetDriver()), text(v.GetHandler()),
		text(v.GetDevice()), text(short(v.GetSandbox().GetId())), text(used), text(total), text(a.age(v.GetCreatedAt())),
	}
	if a.output == formatWide {
		row = append(row, text(v.GetDeviceId()), text(v.GetFsType()), text(access(v)), text(podText(v)),
			text(a.age(v.GetUsageAt())), painted(red, v.GetLastError()))
	}
	return append(row, text(v.GetTargetPath()))
}

// stateCell is where a volume stands; of one that is refused also who said no.
func stateCell(v *adminv1.Volume) cell {
	state := stateName(v.GetState())
	if v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED {
		state = withDetail(state, v.GetRefusedBy())
	}
	return painted(show.StateColour(v.GetState()), state)
}

// podText is the pod as people know it, or else its UID.
func podText(v *adminv1.Volume) string {
	if v.GetPodName() == "" {
		return v.GetPodUid()
	}
	return v.GetPodNamespace() + "/" + v.GetPodName()
}

func usedOf(v *adminv1.Volume) (used, total string) {
	for _, u := range v.GetUsage() {
		if u.GetUnit() == adminv1.VolumeUsage_UNIT_BYTES {
			return size(u.GetUsed()), size(u.GetTotal())
		}
	}
	return nothing, nothing
}

func access(v *adminv1.Volume) string {
	if v.GetReadOnly() {
		return "ro"
	}
	return "rw"
}

// usageTable shows each measure of a filesystem.
func usageTable(usage []*adminv1.VolumeUsage) *table {
	t := &table{heading: []string{"UNIT", "TOTAL", "USED", "AVAILABLE", "USE%"}}
	for _, u := range usage {
		t.add(text(unitName(u.GetUnit())), text(count(u.GetTotal(), u.GetUnit())), text(count(u.GetUsed(), u.GetUnit())),
			text(count(u.GetAvailable(), u.GetUnit())), text(percent(u)))
	}
	return t
}

func unitName(u adminv1.VolumeUsage_Unit) string {
	switch u {
	case adminv1.VolumeUsage_UNIT_BYTES:
		return "bytes"
	case adminv1.VolumeUsage_UNIT_INODES:
		return "inodes"
	default:
		return "unknown"
	}
}

func conditionCell(c *adminv1.VolumeCondition) cell {
	switch {
	case c == nil:
		return text("")
	case c.GetAbnormal():
		return painted(red, "abnormal: "+c.GetMessage())
	}
	return painted(green, withDetail("normal", c.GetMessage()))
}

func withDetail(what, detail string) string {
	if detail == "" {
		return what
	}
	return what + " (" + detail + ")"
}
