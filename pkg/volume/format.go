package volume

import (
	"regexp"
	"slices"
	"sync"
)

var fsTypeForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,31}$`) })

// IsFSType reports whether a text can be the name of a filesystem.
func IsFSType(name string) bool { return fsTypeForm().MatchString(name) }

// FormatPolicy says who formats a blank device.
type FormatPolicy string

// Who formats a blank device.
const (
	// FormatUnset leaves it to the policy's default, and that to the host.
	FormatUnset FormatPolicy = ""
	FormatHost  FormatPolicy = "host"
	FormatGuest FormatPolicy = "guest"
	FormatNever FormatPolicy = "never"
	// FormatDriver is for drivers that defer by themselves; it cannot be configured. The
	// driver is responsible for what is on the device: only a blank one, and one that holds
	// something else than it says, are refused.
	FormatDriver FormatPolicy = "driver"
)

// MakeFS is how a filesystem is made on a blank device, beyond its type.
type MakeFS struct {
	// Options are arguments of the filesystem's mkfs.
	Options []string
	// RootMode are the permissions of the root directory; 0 leaves them to mkfs.
	RootMode uint32
}

// Equal reports whether two make the same filesystem.
func (m MakeFS) Equal(other MakeFS) bool {
	return m.RootMode == other.RootMode && slices.Equal(m.Options, other.Options)
}
