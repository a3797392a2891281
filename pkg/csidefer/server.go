package csidefer

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// Options describe what a driver can do besides leaving a filesystem to the sandbox.
type Options struct {
	// SupplementalGroup: the driver passes on the group that must own the files to the program that mounts. A driver
	// that answers with Respond need not: its caller knows the group.
	SupplementalGroup bool
	// SupplementalGroupChangePolicy: it passes the change policy on too. This includes SupplementalGroup.
	SupplementalGroupChangePolicy bool
	// FileSystems are those that the driver can leave to the sandbox; none means any.
	FileSystems []string
}

// ServerOption makes a gRPC server report that its driver can defer: it adds the options to the answers of
// NodeGetCapabilities and NodeGetInfo, and refuses publish requests that contradict themselves.
func ServerOption(options Options) grpc.ServerOption {
	return grpc.ChainUnaryInterceptor(UnaryInterceptor(options))
}

// UnaryInterceptor is ServerOption for servers that chain their interceptors.
func UnaryInterceptor(options Options) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		if publish, ok := req.(*csi.NodePublishVolumeRequest); ok {
			if err := options.check(publish); err != nil {
				return nil, err
			}
		}
		reply, err := handle(ctx, req)
		if err != nil {
			return reply, err
		}
		return options.amend(reply), nil
	}
}

// amend returns an answer with the options added. It does not change the driver's own
// message, which the driver may reuse.
func (o Options) amend(reply any) any {
	switch reply := reply.(type) {
	case *csi.NodeGetCapabilitiesResponse:
		if reply == nil {
			return reply
		}
		amended := proto.CloneOf(reply)
		addCapability(amended, csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)
		if o.SupplementalGroup || o.SupplementalGroupChangePolicy {
			addCapability(amended, csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP)
		}
		if o.SupplementalGroupChangePolicy {
			addCapability(amended, csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY)
		}
		return amended
	case *csi.NodeGetInfoResponse:
		if reply == nil || len(o.FileSystems) == 0 {
			return reply
		}
		amended := proto.CloneOf(reply)
		dropUnknown(amended, fileSystemsField)
		for _, name := range o.FileSystems {
			appendUnknown(amended, appendMessage(nil, fileSystemsField, []byte(name)))
		}
		return amended
	default:
		return reply
	}
}

func addCapability(reply *csi.NodeGetCapabilitiesResponse, kind csiv1.NodeCapability) {
	value := csi.NodeServiceCapability_RPC_Type(kind)
	has := func(one *csi.NodeServiceCapability) bool { return one.GetRpc().GetType() == value }
	if slices.ContainsFunc(reply.GetCapabilities(), has) {
		return
	}
	reply.Capabilities = append(reply.Capabilities, &csi.NodeServiceCapability{
		Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: value}},
	})
}

// check refuses a group that the driver would not pass on: the files would silently get another owner.
func (o Options) check(req *csi.NodePublishVolumeRequest) error {
	group, policy, err := Group(req.GetVolumeCapability())
	refuse := func(why string) error {
		return status.Errorf(codes.InvalidArgument, "volume %q: %s", req.GetVolumeId(), why)
	}
	switch {
	case err != nil:
		return refuse(err.Error())
	case group == "" && policy == "":
		return nil
	case group == "":
		return refuse("volume_supplemental_group_change_policy is given without a volume_supplemental_group")
	case !Requested(req):
		return refuse("volume_supplemental_group is given without defer_fs_ops; use volume_mount_group")
	case !o.SupplementalGroup && !o.SupplementalGroupChangePolicy:
		return refuse("volume_supplemental_group is given, but this driver does not report DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP")
	case policy != "" && !o.SupplementalGroupChangePolicy:
		return refuse("volume_supplemental_group_change_policy is given, but this driver does not report " +
			"DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY")
	}
	return nil
}
