package csi

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// CSI had VolumeCondition up to 1.12, and kubelet reads it up to Kubernetes 1.36. Both
// numbers are reserved since, so newer kubelets ignore them.
const (
	volumeConditionCapability = csi.NodeServiceCapability_RPC_Type(4)
	volumeConditionField      = 2
)

// setCondition adds the VolumeCondition to an answer that has none.
func setCondition(reply *csi.NodeGetVolumeStatsResponse, condition volume.Condition) {
	var said []byte
	said = protowire.AppendVarint(protowire.AppendTag(said, 1, protowire.VarintType), protowire.EncodeBool(condition.Abnormal))
	said = protowire.AppendString(protowire.AppendTag(said, 2, protowire.BytesType), condition.Message)
	raw := protowire.AppendTag(nil, volumeConditionField, protowire.BytesType)
	reply.ProtoReflect().SetUnknown(protowire.AppendBytes(raw, said))
}
