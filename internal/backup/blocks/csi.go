package blocks

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/redact"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// DialCSI returns a connection to a driver's socket.
func DialCSI(socket string) (*grpc.ClientConn, error) {
	path := strings.TrimPrefix(strings.TrimPrefix(socket, "unix:"), "//")
	if info, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("there is no CSI socket: %w", err)
	} else if info.Mode().Type() != os.ModeSocket {
		return nil, fmt.Errorf("%s is not a socket", path)
	}
	return grpc.NewClient("passthrough:///csi", reconnect(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(), grpc.WithAuthority("localhost"), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return sys.DialUnix(ctx, path)
		}))
}

// FromCSI asks a CSI driver. base and target are CSI's ids of snapshots; base may be empty. A
// driver may need secrets. Its errors do not repeat them.
func FromCSI(conn grpc.ClientConnInterface, base, target string, secrets map[string]string) Source {
	client := csi.NewSnapshotMetadataClient(conn)
	redacted := func(err error) error {
		if st, ok := status.FromError(err); ok && err != nil {
			return status.Error(st.Code(), redact.Secrets(st.Message(), secrets))
		}
		return err
	}
	return func(ctx context.Context, from int64) (Stream, error) {
		var next Stream
		var err error
		if base == "" {
			next, err = received(client.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{
				SnapshotId: target, StartingOffset: from, MaxResults: mostResults, Secrets: secrets,
			}))
		} else {
			next, err = received(client.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{
				BaseSnapshotId: base, TargetSnapshotId: target, StartingOffset: from, MaxResults: mostResults, Secrets: secrets,
			}))
		}
		if err != nil {
			return nil, redacted(err)
		}
		return func() (Message, error) {
			message, err := next()
			return message, redacted(err)
		}, nil
	}
}

// blockMessage has the methods that the answers of the four calls have in common.
type blockMessage[T ~int32, B blockTuple] interface {
	GetBlockMetadataType() T
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []B
}

type blockTuple interface {
	GetByteOffset() int64
	GetSizeBytes() int64
}

// received turns the gRPC stream of one of the four calls into a Stream.
func received[M blockMessage[T, B], T ~int32, B blockTuple](stream interface{ Recv() (M, error) }, err error) (Stream, error) {
	if err != nil {
		return nil, err
	}
	return func() (Message, error) {
		got, err := stream.Recv()
		if err != nil {
			return Message{}, err
		}
		message := Message{Type: Type(got.GetBlockMetadataType()), Capacity: got.GetVolumeCapacityBytes()}
		for _, b := range got.GetBlockMetadata() {
			message.Ranges = append(message.Ranges, Range{Offset: b.GetByteOffset(), Size: b.GetSizeBytes()})
		}
		return message, nil
	}, nil
}
