package csidefer_test

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// node gives the same answers again and again, as many drivers do.
type node struct {
	csi.UnimplementedNodeServer
	capabilities *csi.NodeGetCapabilitiesResponse
}

func (n *node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return n.capabilities, nil
}

func (*node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "n"}, nil
}

func (*node) NodePublishVolume(context.Context, *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return &csi.NodePublishVolumeResponse{}, nil
}

func rpcCapability(kind csi.NodeServiceCapability_RPC_Type) *csi.NodeServiceCapability {
	return &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: kind}}}
}

// serve serves a node on a unix socket and connects to it.
func serve(t *testing.T, options csidefer.Options) (csi.NodeClient, *node) {
	t.Helper()
	n := &node{capabilities: &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{
		rpcCapability(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME),
	}}}
	path := filepath.Join(t.TempDir(), "s")
	server := grpc.NewServer(csidefer.ServerOption(options))
	csi.RegisterNodeServer(server, n)
	rpctest.Serve(t, path, server)
	return csi.NewNodeClient(rpctest.Dial(t, path)), n
}

func TestCapabilitiesAreReported(t *testing.T) {
	const (
		base   = int32(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
		ops    = int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS)
		group  = int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP)
		policy = int32(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY)
	)
	for name, c := range map[string]struct {
		options csidefer.Options
		want    []int32
	}{
		"plain":           {csidefer.Options{}, []int32{base, ops}},
		"group":           {csidefer.Options{SupplementalGroup: true}, []int32{base, ops, group}},
		"policy":          {csidefer.Options{SupplementalGroupChangePolicy: true}, []int32{base, ops, group, policy}},
		"some filesystem": {csidefer.Options{FileSystems: []string{"ext4", "xfs"}}, []int32{base, ops}},
	} {
		t.Run(name, func(t *testing.T) {
			client, n := serve(t, c.options)
			for range 2 {
				reply := check.Value(client.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{}))(t)
				var got []int32
				for _, one := range reply.GetCapabilities() {
					got = append(got, int32(one.GetRpc().GetType()))
				}
				check.Same(t, cmp.Diff(c.want, got), "-want +got")
			}
			check.That(t, len(n.capabilities.GetCapabilities()) == 1, "the driver's own message was changed")
			n.capabilities.Capabilities = append(n.capabilities.Capabilities, rpcCapability(csi.NodeServiceCapability_RPC_Type(ops)))
			reply, err := client.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
			check.That(t, err == nil && len(reply.GetCapabilities()) == len(c.want), "what the driver reports itself is doubled: %v, %v", reply, err)
			info, err := client.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
			check.Require(t, err == nil && info.GetNodeId() == "n", "%v %v", info, err)
			fields := &csiv1.NodeGetInfoResponseFields{}
			err = proto.Unmarshal(info.ProtoReflect().GetUnknown(), fields)
			diff := cmp.Diff(c.options.FileSystems, fields.GetSupportedFileSystems())
			check.That(t, diff == "" && err == nil, "%v %v", diff, err)
		})
	}
}

func TestContradictionsAreRefused(t *testing.T) {
	with := func(group, policy string, deferred bool) *csi.NodePublishVolumeRequest {
		req := &csi.NodePublishVolumeRequest{VolumeId: "v", VolumeCapability: mountCapability()}
		csidefer.SetGroup(req.GetVolumeCapability(), group, policy)
		if deferred {
			csidefer.SetRequested(req)
		}
		return req
	}
	broken := &csi.NodePublishVolumeRequest{VolumeId: "v", VolumeCapability: mountCapability()}
	csidefer.SetGroup(broken.GetVolumeCapability(), "\xff", "")
	groups := csidefer.Options{SupplementalGroup: true}
	policies := csidefer.Options{SupplementalGroupChangePolicy: true}
	for name, c := range map[string]struct {
		options csidefer.Options
		req     *csi.NodePublishVolumeRequest
		want    codes.Code
	}{
		"not deferred":               {csidefer.Options{}, with("", "", false), codes.OK},
		"deferred":                   {csidefer.Options{}, with("", "", true), codes.OK},
		"group":                      {groups, with("5", "", true), codes.OK},
		"group and policy":           {policies, with("5", "Always", true), codes.OK},
		"group that is not reported": {csidefer.Options{}, with("5", "", true), codes.InvalidArgument},
		"policy not reported":        {groups, with("5", "Always", true), codes.InvalidArgument},
		"policy without a group":     {policies, with("", "Always", true), codes.InvalidArgument},
		"group without deferral":     {policies, with("5", "", false), codes.InvalidArgument},
		"malformed":                  {policies, broken, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			client, _ := serve(t, c.options)
			check.Code(t, check.Err(client.NodePublishVolume(t.Context(), c.req)), c.want)
			check.Code(t, check.Err(client.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{})), codes.Unimplemented) // the driver's own error
		})
	}
}
