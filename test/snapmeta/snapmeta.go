// Package snapmeta plays external-snapshot-metadata, the sidecar that Kubernetes asks for the
// blocks of snapshots: with its wire, and with its questions to the API server and the CSI
// driver, in its order. The sidecar itself is not to be had from the Go module proxy.
package snapmeta

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"

	wire "github.com/crust-proxy/crust-proxy/proto/snapshotmetadata"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Server is a sidecar of one driver.
type Server struct {
	wire.UnimplementedSnapshotMetadataServer
	// Client is that of the API server, with the sidecar's rights.
	Client kubernetes.Interface
	// Driver is the driver's name, and CSI its socket.
	Driver string
	CSI    grpc.ClientConnInterface
	// Audience is that of the SnapshotMetadataService object.
	Audience string
	// MaxResults is the most blocks in a message; 0 leaves it to the client.
	MaxResults int32
	// MaxMessages ends each stream after so many, as the sidecar does with one that takes long; 0 is no bound.
	MaxMessages int

	mu     sync.Mutex
	tokens []string
}

// Tokens are those that streams began with.
func (s *Server) Tokens() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.tokens)
}

// Start serves on the loopback until the test ends, and gives the address and the
// certificate of the authority that signed the server's. The server has the names given.
func (s *Server) Start(t rig.T, names ...string) (address string, authority []byte) {
	t.Helper()
	// The authority's own certificate comes behind the server's.
	authority, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, names)
	check.Must(t, err)
	certificate := check.Value(tls.X509KeyPair(authority, key))(t)
	listener := check.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	server := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&certificate)))
	wire.RegisterSnapshotMetadataServer(server, s)
	rpctest.ServeOn(t, listener, server)
	return listener.Addr().String(), authority
}

// GetMetadataAllocated streams what the driver does.
func (s *Server) GetMetadataAllocated(req *wire.GetMetadataAllocatedRequest, stream wire.SnapshotMetadata_GetMetadataAllocatedServer) error {
	handle, err := s.handle(stream.Context(), req.GetSecurityToken(), req.GetNamespace(), req.GetSnapshotName())
	if err != nil {
		return err
	}
	blocks, err := csi.NewSnapshotMetadataClient(s.CSI).GetMetadataAllocated(stream.Context(), &csi.GetMetadataAllocatedRequest{
		SnapshotId: handle, StartingOffset: req.GetStartingOffset(), MaxResults: s.most(req.GetMaxResults()),
	})
	if err != nil {
		return err
	}
	return s.copy(func(allowed error) error {
		m, err := blocks.Recv()
		if err = cmp.Or(err, allowed); err != nil {
			return err
		}
		return stream.Send(&wire.GetMetadataAllocatedResponse{
			BlockMetadataType:   wire.BlockMetadataType(m.GetBlockMetadataType()),
			VolumeCapacityBytes: m.GetVolumeCapacityBytes(), BlockMetadata: tuples(m.GetBlockMetadata()),
		})
	})
}

// GetMetadataDelta streams what the driver does.
func (s *Server) GetMetadataDelta(req *wire.GetMetadataDeltaRequest, stream wire.SnapshotMetadata_GetMetadataDeltaServer) error {
	handle, err := s.handle(stream.Context(), req.GetSecurityToken(), req.GetNamespace(), req.GetTargetSnapshotName())
	if err != nil {
		return err
	}
	blocks, err := csi.NewSnapshotMetadataClient(s.CSI).GetMetadataDelta(stream.Context(), &csi.GetMetadataDeltaRequest{
		BaseSnapshotId: req.GetBaseSnapshotId(), TargetSnapshotId: handle,
		StartingOffset: req.GetStartingOffset(), MaxResults: s.most(req.GetMaxResults()),
	})
	if err != nil {
		return err
	}
	return s.copy(func(allowed error) error {
		m, err := blocks.Recv()
		if err = cmp.Or(err, allowed); err != nil {
			return err
		}
		return stream.Send(&wire.GetMetadataDeltaResponse{
			BlockMetadataType:   wire.BlockMetadataType(m.GetBlockMetadataType()),
			VolumeCapacityBytes: m.GetVolumeCapacityBytes(), BlockMetadata: tuples(m.GetBlockMetadata()),
		})
	})
}

// most is always free to be less than the client allows.
func (s *Server) most(asked int32) int32 {
	if s.MaxResults > 0 && (asked == 0 || asked > s.MaxResults) {
		return s.MaxResults
	}
	return asked
}

func tuples(blocks []*csi.BlockMetadata) (out []*wire.BlockMetadata) {
	for _, b := range blocks {
		out = append(out, &wire.BlockMetadata{ByteOffset: b.GetByteOffset(), SizeBytes: b.GetSizeBytes()})
	}
	return out
}

// copy copies messages; next gets the error that the next one would be, if there is one. The
// driver's errors keep their codes.
func (s *Server) copy(next func(error) error) error {
	var allowed error
	for n := 0; ; n++ {
		if n > 0 && n == s.MaxMessages {
			allowed = status.Error(codes.DeadlineExceeded, "the stream takes too long")
		}
		if err := next(allowed); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// handle judges the caller, and finds CSI's id of the snapshot.
func (s *Server) handle(ctx context.Context, token, namespace, name string) (string, error) {
	s.mu.Lock()
	s.tokens = append(s.tokens, token)
	s.mu.Unlock()
	user, err := s.authenticate(ctx, token)
	if err != nil {
		return "", err
	}
	if err := s.authorize(ctx, user, namespace); err != nil {
		return "", err
	}
	return s.find(ctx, namespace, name)
}

func (s *Server) authenticate(ctx context.Context, token string) (authenticationv1.UserInfo, error) {
	review, err := s.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{s.Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, status.Error(codes.Internal, "the token cannot be reviewed: "+err.Error())
	}
	if !review.Status.Authenticated {
		return authenticationv1.UserInfo{}, status.Error(codes.Unauthenticated, "unauthenticated user")
	}
	return review.Status.User, nil
}

func (s *Server) authorize(ctx context.Context, user authenticationv1.UserInfo, namespace string) error {
	review, err := s.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, Groups: user.Groups, UID: user.UID,
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: namespace, Verb: "get", Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots",
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return status.Error(codes.Internal, "the user cannot be reviewed: "+err.Error())
	}
	if !review.Status.Allowed {
		return status.Errorf(codes.PermissionDenied, "user %s may not get volumesnapshots in namespace %s", user.Username, namespace)
	}
	return nil
}

func (s *Server) find(ctx context.Context, namespace, name string) (string, error) {
	var snapshot struct {
		Status struct {
			Content string `json:"boundVolumeSnapshotContentName"`
			Ready   bool   `json:"readyToUse"`
		} `json:"status"`
	}
	if err := s.get(ctx, namespace, "volumesnapshots", name, &snapshot); err != nil {
		return "", err
	}
	if !snapshot.Status.Ready {
		return "", status.Error(codes.Unavailable, "the snapshot is not ready")
	}
	var content struct {
		Spec struct {
			Driver string `json:"driver"`
		} `json:"spec"`
		Status struct {
			Handle string `json:"snapshotHandle"`
		} `json:"status"`
	}
	if err := s.get(ctx, "", "volumesnapshotcontents", snapshot.Status.Content, &content); err != nil {
		return "", err
	}
	if content.Spec.Driver != s.Driver {
		return "", status.Errorf(codes.InvalidArgument, "the snapshot is of driver %s", content.Spec.Driver)
	}
	return content.Status.Handle, nil
}

func (s *Server) get(ctx context.Context, namespace, resource, name string, into any) error {
	raw, err := s.Client.CoreV1().RESTClient().Get().AbsPath("/apis/snapshot.storage.k8s.io/v1").
		NamespaceIfScoped(namespace, namespace != "").Resource(resource).Name(name).DoRaw(ctx)
	if err != nil {
		return status.Error(codes.NotFound, err.Error())
	}
	return json.Unmarshal(raw, into)
}
