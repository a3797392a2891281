// Package deferral holds what a deferred volume is: the instruction and its
// validation, the record of it on disk, the claim on its device, the guard on
// its target, and the order in which these come and go.
//
// It knows no gRPC, no CSI and no runtime. Runtimes are reached through the
// small Projector interface.
package deferral

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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

// VolumeType says what stands behind a volume.
type VolumeType string

// The types of volume.
const (
	Block   VolumeType = "block"
	Network VolumeType = "network"
)

// GroupPolicy says when a sandbox changes the group of a volume's files.
type GroupPolicy string

// The group change policies, spelled as Kubernetes and Kata spell them.
const (
	GroupPolicyUnset GroupPolicy = ""
	GroupAlways      GroupPolicy = "Always"
	GroupOnMismatch  GroupPolicy = "OnRootMismatch"
)

// Instruction is the deferred filesystem work, as a caller asks for it.
type Instruction struct {
	Type        VolumeType
	Target      string
	Backing     string
	FSType      string
	MountFlags  []string
	Group       string
	GroupPolicy GroupPolicy
	// Handler names the runtime handler; empty means the default one.
	Handler string
	// Driver names the CSI driver, where it is known.
	Driver string
	// Format says who formats a blank device. Unset, the device is not looked at:
	// whoever hands it over answers for what is on it.
	Format FormatPolicy
	// CSI says where the instruction came from, where the front made it.
	CSI *CSIOrigin
}

// CSIOrigin says which CSI volume a deferred volume is, where it came through the
// front. It is what unpublish, expansion and a restart need to know again; no
// secret of the request is in it.
type CSIOrigin struct {
	VolumeID string `json:"volumeID"`
	// Way is WayNative or WayBlock.
	Way string `json:"way"`
	// Rule is the policy's word that had the volume deferred.
	Rule string `json:"rule"`
	// AccessMode is CSI's name of it, such as SINGLE_NODE_WRITER.
	AccessMode string `json:"accessMode"`
	// Staging is kubelet's staging path.
	Staging string `json:"staging,omitempty"`
	// Private is where the driver published the device, PrivateStaging where it
	// staged it.
	Private        string `json:"private,omitempty"`
	PrivateStaging string `json:"privateStaging,omitempty"`
	// PodNamespace and PodName are empty where they are not known.
	PodNamespace string `json:"podNamespace,omitempty"`
	PodName      string `json:"podName,omitempty"`
}

// The ways in which the front has a volume deferred.
const (
	// WayNative is a driver that deferred by itself.
	WayNative = "native"
	// WayBlock is a driver that was asked for block access.
	WayBlock = "block"
)

// DeviceKind tells a block device from a disk image.
type DeviceKind string

// The kinds of device.
const (
	BlockDevice DeviceKind = "block"
	ImageFile   DeviceKind = "image"
)

// Device is the backing of a volume by what it is, not by what it is called.
type Device struct {
	Kind DeviceKind `json:"kind"`
	// Path is a name that leads to the device: the kernel's own one for a block
	// device, the resolved path for an image.
	Path string `json:"path"`
	// Major and Minor number a block device, and the filesystem of an image.
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
	// Inode numbers an image in its filesystem.
	Inode uint64 `json:"inode,omitempty"`
}

// clone keeps a record apart from what its caller does with the instruction.
func (o *CSIOrigin) clone() *CSIOrigin {
	if o == nil {
		return nil
	}
	own := *o
	return &own
}

// String describes the identity.
func (d Device) String() string {
	if d.Kind == ImageFile {
		return fmt.Sprintf("image %d:%d inode %d", d.Major, d.Minor, d.Inode)
	}
	return fmt.Sprintf("block %d:%d", d.Major, d.Minor)
}

// Volume is a validated instruction with all names resolved. It is what a
// record holds and what a runtime handler is given. Nobody changes one after it
// was made.
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
	// CSI says which CSI volume this is, where it came through the front.
	CSI *CSIOrigin `json:"csi,omitempty"`
	// GrowTo is the size in bytes to which the sandbox shall grow the filesystem
	// when it mounts it; 0 is none.
	GrowTo int64 `json:"growTo,omitempty"`
	// Adopted is set for a volume that another program published; it has no
	// record and is never changed.
	Adopted bool `json:"-"`
}
