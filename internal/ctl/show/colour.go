package show

import adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"

// Colours and attributes: the terminal's own sixteen, so that its owner's choice of
// them holds.
const (
	Plain  = ""
	Red    = "\x1b[31m"
	Green  = "\x1b[32m"
	Yellow = "\x1b[33m"
	Faint  = "\x1b[2m"
	Bold   = "\x1b[1m"
	Reset  = "\x1b[0m"
)

// StateColour is how a volume's state is painted.
func StateColour(s adminv1.VolumeState) string {
	switch s {
	case adminv1.VolumeState_VOLUME_STATE_BOUND:
		return Green
	case adminv1.VolumeState_VOLUME_STATE_DEGRADED, adminv1.VolumeState_VOLUME_STATE_REFUSED:
		return Red
	case adminv1.VolumeState_VOLUME_STATE_REMOVING:
		return Yellow
	case adminv1.VolumeState_VOLUME_STATE_ADOPTED:
		return Faint
	default:
		return Plain
	}
}
