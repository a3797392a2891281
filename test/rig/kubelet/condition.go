package kubelet

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// VolumeCondition is the number of the capability by which a kubelet up to Kubernetes 1.36
// knows that stats hold a condition.
const VolumeCondition = csi.NodeServiceCapability_RPC_Type(4)

// Condition is what such a kubelet reads of stats: CSI's VolumeCondition, which has left
// CSI 1.13 and is a field that its messages do not know. Ours has the same numbers.
func Condition(reply *csi.NodeGetVolumeStatsResponse) (*runtimev1.VolumeCondition, error) {
	old := &handlerv1.GetVolumeStatsResponse{}
	err := proto.Unmarshal(reply.ProtoReflect().GetUnknown(), old)
	return old.GetVolumeCondition(), err
}
