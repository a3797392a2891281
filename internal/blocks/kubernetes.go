package blocks

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/crust-proxy/crust-proxy/proto/snapshotmetadata"
)

// aliveTime is after how long of silence the kernel asks a peer whether it is still there:
// between two messages a driver may have much to compare.
const aliveTime = 30 * time.Second

// Dial makes a connection to the service. An address, such as that of a forwarded port, takes
// the place of the service's own, whose certificate is wanted all the same.
func (s *Service) Dial(address string) (*grpc.ClientConn, error) {
	host, _, err := net.SplitHostPort(s.Address)
	if err != nil {
		return nil, fmt.Errorf("the address of the SnapshotMetadataService is not HOST:PORT: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(s.CA) {
		return nil, errNoCA
	}
	if address == "" {
		address = s.Address
	}
	dialer := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: aliveTime, Interval: aliveTime / 3}}
	return grpc.NewClient("passthrough:///"+address, grpc.WithNoProxy(),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: host, MinVersion: tls.VersionTLS12})),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}))
}

// Tokens gives a token for a stream that begins.
type Tokens func(context.Context) (string, error)

// FromService asks external-snapshot-metadata for the blocks of a VolumeSnapshot. Base is CSI's
// id of an earlier one, and may be empty.
func FromService(conn grpc.ClientConnInterface, tokens Tokens, namespace, base, target string) Source {
	client := snapshotmetadata.NewSnapshotMetadataClient(conn)
	return func(ctx context.Context, from int64) (Stream, error) {
		token, err := tokens(ctx)
		if err != nil {
			return nil, err
		}
		if base == "" {
			return received(client.GetMetadataAllocated(ctx, &snapshotmetadata.GetMetadataAllocatedRequest{
				SecurityToken: token, Namespace: namespace, SnapshotName: target, StartingOffset: from, MaxResults: mostResults,
			}))
		}
		return received(client.GetMetadataDelta(ctx, &snapshotmetadata.GetMetadataDeltaRequest{
			SecurityToken: token, Namespace: namespace, BaseSnapshotId: base, TargetSnapshotName: target, StartingOffset: from, MaxResults: mostResults,
		}))
	}
}
