package show

import (
	"strings"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Colours and attributes: the terminal's own sixteen, so that the user's palette
// applies.
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

// StatePrefix is before the name of a state in the API.
const StatePrefix = "VOLUME_STATE_"

// StateName is the name of a volume's state; a volume that is gone has none.
func StateName(s adminv1.VolumeState) string {
	if s == adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED {
		return ""
	}
	return strings.TrimPrefix(s.String(), StatePrefix)
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
