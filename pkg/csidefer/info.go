package csidefer

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// fileSystemsField is the number of NodeGetInfoResponse.supported_file_systems.
const fileSystemsField = 4

// FileSystems reads the filesystems that a driver can leave to the sandbox out of
// its answer of NodeGetInfo; none means any.
func FileSystems(reply *csi.NodeGetInfoResponse) ([]string, error) {
	fields := &csiv1.NodeGetInfoResponseFields{}
	if err := proto.Unmarshal(reply.ProtoReflect().GetUnknown(), fields); err != nil {
		return nil, fmt.Errorf("supported_file_systems: %w", err)
	}
	return fields.GetSupportedFileSystems(), nil
}

// setFileSystems replaces them.
func setFileSystems(reply *csi.NodeGetInfoResponse, names []string) {
	reply.ProtoReflect().SetUnknown(without(reply.ProtoReflect().GetUnknown(), fileSystemsField))
	for _, name := range names {
		appendUnknown(reply, appendMessage(nil, fileSystemsField, []byte(name)))
	}
}
