package blocks

import (
	"cmp"
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

// aliveTime is after how long without traffic the kernel checks that the peer is still there.
// A driver may compare much between two messages.
const aliveTime = 30 * time.Second

// Dial returns a connection to the service. If address is not empty, such as that of a forwarded
// port, it replaces the service's address, but not the name in its certificate.
func (s *Service) Dial(address string) (*grpc.ClientConn, error) {
	host, _, err := net.SplitHostPort(s.Address)
	if err != nil {
		return nil, fmt.Errorf("the address of the SnapshotMetadataService is not HOST:PORT: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(s.CA) {
		return nil, errNoCA
	}
	dialer := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: aliveTime, Interval: aliveTime / 3}}
	return grpc.NewClient("passthrough:///"+cmp.Or(address, s.Address), reconnect(), grpc.WithNoProxy(),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: host, MinVersion: tls.VersionTLS12})),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}))
}

// Tokens returns a token for a new stream.
type Tokens func(context.Context) (string, error)

// FromService asks external-snapshot-metadata for the blocks of a VolumeSnapshot. base is CSI's
// id of an earlier snapshot, and may be empty.
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
