// Package csidefer is for authors of CSI drivers. With a few lines a node plugin reports that
// it can leave a volume's filesystem to the pod's sandbox, and answers what the sandbox has
// to mount. The package also has the functions for callers of such a driver.
//
// CSI's own messages have no fields for this yet. The fields of KEP-2857 are sent as unknown
// fields of those messages, which every protobuf library preserves (see proto/crust/csi/v1).
package csidefer

import (
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// Request is a CSI request that can ask for deferral.
type Request interface {
	*csi.NodePublishVolumeRequest | *csi.NodeUnpublishVolumeRequest |
		*csi.NodeGetVolumeStatsRequest | *csi.NodeExpandVolumeRequest
	proto.Message
}

// deferFieldOf is the number of defer_fs_ops in a request.
func deferFieldOf(req proto.Message) protowire.Number {
	switch req.(type) {
	case *csi.NodePublishVolumeRequest:
		return 9
	case *csi.NodeUnpublishVolumeRequest:
		return 3
	case *csi.NodeGetVolumeStatsRequest:
		return 4
	default:
		return 7 // NodeExpandVolumeRequest
	}
}

// Requested reports whether a request has defer_fs_ops set.
func Requested[R Request](req R) bool {
	if !req.ProtoReflect().IsValid() {
		return false
	}
	requested := false
	eachField(req.ProtoReflect().GetUnknown(), func(num protowire.Number, kind protowire.Type, value []byte) {
		if num == deferFieldOf(req) && kind == protowire.VarintType {
			v, _ := protowire.ConsumeVarint(value)
			requested = v != 0 // as in protobuf, the last one counts
		}
	})
	return requested
}

// SetRequested sets defer_fs_ops in a request.
func SetRequested[R Request](req R) {
	ClearRequested(req)
	appendUnknown(req, protowire.AppendVarint(protowire.AppendTag(nil, deferFieldOf(req), protowire.VarintType), 1))
}

// ClearRequested removes defer_fs_ops from a request.
func ClearRequested[R Request](req R) { dropUnknown(req, deferFieldOf(req)) }

// Mount is what a sandbox has to mount.
type Mount struct {
	// Device is the path of the block device that holds the filesystem.
	Device string
	// FSType is the filesystem. The driver has formatted a blank device already.
	FSType string
	// Flags are the mount options. They are stored in clear text: with a secret among them the volume is refused.
	Flags []string
}

const deferredMountField = 1000

// Respond adds the deferred instruction to the answer of NodePublishVolume. Device and FSType
// are required: the caller refuses an answer without them.
func Respond(reply *csi.NodePublishVolumeResponse, mount Mount) {
	StripDeferredMount(reply)
	appendUnknown(reply, appendMessage(nil, deferredMountField, mount.encode()))
}

// encode encodes a csiv1.DeferredMount. It does not use protobuf's encoder, which drops the whole message where a text
// is not UTF-8: this way the reader sees the text and can report what is wrong.
func (m Mount) encode() []byte {
	kind := protowire.AppendTag(nil, 1, protowire.VarintType)
	kind = protowire.AppendVarint(kind, uint64(runtimev1.VolumeType_BLOCK))
	raw := appendMessage(nil, 1, kind)
	raw = appendText(raw, 2, m.Device)
	raw = appendText(raw, 3, m.FSType)
	for _, flag := range m.Flags {
		raw = appendMessage(raw, 4, []byte(flag)) // an empty one is kept too
	}
	return raw
}

// DeferredMount reads the deferred instruction from an answer of NodePublishVolume, and reports whether there is one.
func DeferredMount(reply *csi.NodePublishVolumeResponse) (mount *csiv1.DeferredMount, given bool, err error) {
	fields := &csiv1.NodePublishVolumeResponseFields{}
	if err := proto.Unmarshal(reply.ProtoReflect().GetUnknown(), fields); err != nil {
		return nil, false, fmt.Errorf("deferred_mount: %w", err)
	}
	return fields.GetDeferredMount(), fields.GetDeferredMount() != nil, nil
}

// StripDeferredMount removes the deferred instruction from an answer.
func StripDeferredMount(reply *csi.NodePublishVolumeResponse) {
	dropUnknown(reply, deferredMountField)
}

// The numbers of the group's fields in VolumeCapability.MountVolume.
const (
	groupField  = 4
	policyField = 5
)

// Group reads the supplemental group and its change policy from a volume capability; each is empty if it is not set.
func Group(capability *csi.VolumeCapability) (group, policy string, err error) {
	mount := capability.GetMount()
	if mount == nil {
		return "", "", nil
	}
	fields := &csiv1.MountVolumeFields{}
	if err := proto.Unmarshal(mount.ProtoReflect().GetUnknown(), fields); err != nil {
		return "", "", fmt.Errorf("volume_supplemental_group: %w", err)
	}
	return fields.GetVolumeSupplementalGroup(), fields.GetVolumeSupplementalGroupChangePolicy(), nil
}

// SetGroup sets the supplemental group and its change policy in a mount capability. It does
// nothing with a block capability.
func SetGroup(capability *csi.VolumeCapability, group, policy string) {
	mount := capability.GetMount()
	if mount == nil {
		return
	}
	dropUnknown(mount, groupField, policyField)
	appendUnknown(mount, appendText(appendText(nil, groupField, group), policyField, policy))
}

// fileSystemsField is the number of NodeGetInfoResponse.supported_file_systems.
const fileSystemsField = 4

func appendMessage(raw []byte, num protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(raw, num, protowire.BytesType), value)
}

// appendText adds a string field, which proto3 leaves out where it is empty.
func appendText(raw []byte, num protowire.Number, value string) []byte {
	if value == "" {
		return raw
	}
	return appendMessage(raw, num, []byte(value))
}

// appendUnknown adds encoded fields to the unknown fields of a message.
func appendUnknown(message proto.Message, raw []byte) {
	m := message.ProtoReflect()
	m.SetUnknown(append(slices.Clip(m.GetUnknown()), raw...))
}

// eachField calls see for each encoded field. It ends at malformed bytes, which no protobuf
// library keeps as unknown fields.
func eachField(raw []byte, see func(num protowire.Number, kind protowire.Type, value []byte)) {
	for len(raw) > 0 {
		num, kind, tag := protowire.ConsumeTag(raw)
		if tag < 0 {
			return
		}
		size := protowire.ConsumeFieldValue(num, kind, raw[tag:])
		if size < 0 {
			return
		}
		see(num, kind, raw[tag:tag+size])
		raw = raw[tag+size:]
	}
}

// dropUnknown removes unknown fields of a message by their numbers.
func dropUnknown(message proto.Message, drop ...protowire.Number) {
	var kept []byte
	eachField(message.ProtoReflect().GetUnknown(), func(num protowire.Number, kind protowire.Type, value []byte) {
		if !slices.Contains(drop, num) {
			kept = append(protowire.AppendTag(kept, num, kind), value...)
		}
	})
	message.ProtoReflect().SetUnknown(kept)
}
