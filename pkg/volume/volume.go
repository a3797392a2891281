// Package volume has the types that the parts of crust-proxy share: a volume and its
// key, the instruction that it was made from, its device, what a sandbox reports about
// it, and the kinds of errors. It imports only the standard library.
//
// It is for authors of runtime handlers, who get a *Volume for each call. Its types only gain fields.
package volume

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"time"
)

// Key identifies a volume: the hex sha256 of its resolved target path.
type Key string

// KeyOf makes the key of a resolved target path.
func KeyOf(resolvedTarget string) Key {
	sum := sha256.Sum256([]byte(resolvedTarget))
	return Key(hex.EncodeToString(sum[:]))
}

// Short is the beginning of the key, enough for people.
func (k Key) Short() string {
	if len(k) < 12 {
		return string(k)
	}
	return string(k[:12])
}

// Type is the kind of storage behind a volume.
type Type string

// The types of volume.
const (
	Block   Type = "block"
	Network Type = "network"
)

// GroupPolicy is when a sandbox changes the group of a volume's files.
type GroupPolicy string

// The group change policies, spelled as Kubernetes and Kata spell them.
const (
	GroupPolicyUnset GroupPolicy = ""
	GroupAlways      GroupPolicy = "Always"
	GroupOnMismatch  GroupPolicy = "OnRootMismatch"
)

// Instruction is the deferred filesystem work, as a caller asks for it.
type Instruction struct {
	Type        Type
	Target      string
	Backing     string
	FSType      string
	MountFlags  []string
	Group       string
	GroupPolicy GroupPolicy
	// Handler names the runtime handler; empty means the default one.
	Handler string
	// Driver names the volume's driver, if it is known.
	Driver string
	// Format is who formats a blank device. If it is unset the device is not checked: the
	// caller is responsible for what is on it.
	Format FormatPolicy
	// MakeFS is how, if this node formats it.
	MakeFS MakeFS
	// KeepSize: a filesystem that is smaller than its device is not grown on this node.
	KeepSize bool
	// Origin is set if the front made the instruction.
	Origin *Origin
}

// Origin is what a deferred volume is for its driver, if it came through the front. Unpublish, expansion and
// a restart need it; no secret of the request is in it.
type Origin struct {
	VolumeID string `json:"volumeID"`
	// Way is WayNative or WayBlock.
	Way string `json:"way"`
	// Rule is the policy's rule by which the volume was deferred.
	Rule string `json:"rule"`
	// AccessMode is its name in the driver's protocol, such as SINGLE_NODE_WRITER.
	AccessMode string `json:"accessMode"`
	// Staging is the orchestrator's staging path.
	Staging string `json:"staging,omitempty"`
	// Private is where the driver published the device, PrivateStaging where it staged it.
	Private        string `json:"private,omitempty"`
	PrivateStaging string `json:"privateStaging,omitempty"`
	// PodNamespace and PodName are empty if they are not known.
	PodNamespace string `json:"podNamespace,omitempty"`
	PodName      string `json:"podName,omitempty"`
	// PVC is the persistent volume claim in PodNamespace, or empty if it is not known.
	PVC string `json:"pvc,omitempty"`
}

// The ways in which the front defers a volume.
const (
	// WayNative is a driver that deferred by itself.
	WayNative = "native"
	// WayBlock is a driver that was asked for block access.
	WayBlock = "block"
)

// DeviceKind is what a Device is: a block device or a disk image.
type DeviceKind string

// The kinds of device.
const (
	BlockDevice DeviceKind = "block"
	ImageFile   DeviceKind = "image"
)

// Device is the backing of a volume, identified by what it is and not by its name.
type Device struct {
	Kind DeviceKind `json:"kind"`
	// Path leads to the device: the kernel's own name of a block device, or the resolved path of an image.
	Path string `json:"path"`
	// Major and Minor number a block device, and the filesystem of an image.
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Inode numbers an image in its filesystem.
	Inode uint64 `json:"inode,omitempty"`
}

// Clone returns a copy, so that a record does not change with its caller's instruction.
func (o *Origin) Clone() *Origin {
	if o == nil {
		return nil
	}
	return new(*o)
}

// String describes the identity.
func (d Device) String() string {
	if d.Kind == ImageFile {
		return fmt.Sprintf("image %d:%d inode %d", d.Major, d.Minor, d.Inode)
	}
	return fmt.Sprintf("block %d:%d", d.Major, d.Minor)
}

// Same reports whether two devices are one, whatever their names are.
func (d Device) Same(other Device) bool {
	return d.Kind == other.Kind && d.Major == other.Major && d.Minor == other.Minor && d.Inode == other.Inode
}

// Volume is a validated instruction with all names resolved. A record holds one, and
// runtime handlers get one. It is never changed after it was made.
type Volume struct {
	Key Key `json:"key"`
	// Target is the path as the caller gave it, ResolvedTarget the path without
	// symbolic links that a runtime sees as a mount's source.
	Target         string `json:"target"`
	ResolvedTarget string `json:"resolvedTarget"`
	// Backing is the device path as the caller gave it.
	Backing     string      `json:"backing"`
	Device      Device      `json:"device"`
	FSType      string      `json:"fsType"`
	MountFlags  []string    `json:"mountFlags,omitempty"`
	ReadOnly    bool        `json:"readOnly,omitempty"`
	Group       string      `json:"group,omitempty"`
	GroupPolicy GroupPolicy `json:"groupPolicy,omitempty"`
	Handler     string      `json:"handler"`
	Driver      string      `json:"driver,omitempty"`
	PodUID      string      `json:"podUID,omitempty"`
	Created     time.Time   `json:"created"`
	// Origin is set if the volume came through the front.
	Origin *Origin `json:"csi,omitempty"`
	// GrowTo is the size in bytes to which the sandbox shall grow the filesystem
	// when it mounts it, if it can; 0 is none.
	GrowTo int64 `json:"growTo,omitempty"`
	// KeepSize: its filesystem is not grown on this node, see Instruction.
	KeepSize bool `json:"keepSize,omitempty"`
	// Adopted is set for a volume that another program published; it has no record and is never changed.
	Adopted bool `json:"-"`
}

// Unit is what a Usage counts.
type Unit uint8

// The units, numbered as in Kata's replies.
const (
	UnitUnknown Unit = 0
	UnitBytes   Unit = 1
	UnitInodes  Unit = 2
)

// Usage is one measure of a filesystem. None of its numbers is negative, and neither Available nor Used exceeds Total.
type Usage struct {
	Available int64
	Total     int64
	Used      int64
	Unit      Unit
}

// Condition is the health of a volume, as its sandbox reports it or its device shows it.
type Condition struct {
	Abnormal bool
	Message  string
	// Reason is one word for programs, such as abi.ReasonReadOnly, or empty.
	Reason string
}

// Report is a sandbox's answer about a volume, after its checks. The Condition is nil if it is not known.
type Report struct {
	Usage     []Usage
	Condition *Condition
	// Sandbox is the sandbox that answered, if the handler knows it.
	Sandbox string
	// GroupIgnored is set where the sandbox's runtime ignores the volume's group, and
	// the root directory is not known to be writable for that group.
	GroupIgnored bool
}

// Range is a requested size in bytes; a zero Limit is none.
type Range struct {
	Required int64
	Limit    int64
}

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
	// FormatDriver is for drivers that defer by themselves; it cannot be configured. The driver is responsible for what
	// is on the device: only a blank one, and one that holds something else than it says, are refused.
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
