package backupcli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// blockAdvice is what to do about the codes of CSI's SnapshotMetadata.
var blockAdvice = map[codes.Code]string{
	codes.NotFound:           "Is the snapshot deleted? The id of one is in its VolumeSnapshotContent, status.snapshotHandle; each node has its own.",
	codes.InvalidArgument:    "The base must be an earlier snapshot of the same volume.",
	codes.FailedPrecondition: "The driver cannot compare these two now: make a full backup, without a base.",
	codes.Unimplemented:      "The driver does not serve changed blocks (CSI's SnapshotMetadata).",
	codes.OutOfRange:         "The snapshot is smaller than expected: is it another one now? Begin anew.",
	codes.Unavailable:        "Does the driver run, and its sidecar? See the logs of its pod, and try it again.",
	codes.Unauthenticated:    "The server does not accept the token: see the audience of the SnapshotMetadataService and the server's log.",
	codes.PermissionDenied:   "Allow the service account to get volumesnapshots in the snapshot's namespace.",
}

const certificateAdvice = "Check the SnapshotMetadataService: its caCert must verify the server's certificate, and the certificate must name the host of its address."

func brokenStream(err error, at int64, pause time.Duration) string {
	return fmt.Sprintf("the stream broke at %s: %s; retrying in %v", show.Size(at), show.Escape(status.Convert(err).Message()), pause)
}

func explainBlocks(ctx context.Context, err error) error {
	var server *blocks.ServerError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case errors.As(err, &server):
		return command.Explain(err, "Nothing was used of that message. The driver is at fault: tell its author.")
	}
	if advice := clusterAdvice(err); advice != "" {
		return command.Explain(err, advice)
	}
	var answer interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &answer) {
		return err
	}
	st := answer.GRPCStatus()
	advice := show.Either(blocks.IsCertificate(err), certificateAdvice, blockAdvice[st.Code()])
	return command.Explain(fmt.Errorf("%s (%s)", show.Escape(st.Message()), st.Code()), advice)
}

func clusterAdvice(err error) string {
	var answer apierrors.APIStatus
	switch {
	case !errors.As(err, &answer):
		return ""
	case apierrors.IsForbidden(err):
		return "Who asks needs the rights of deploy/kustomize/examples/changed-blocks/client.yaml."
	case apierrors.IsUnauthorized(err):
		return "The API server does not know the identity of the kubeconfig: is it of this cluster, and current?"
	case apierrors.IsNotFound(err):
		return "Are --namespace and --context right? A driver without SnapshotMetadataService has no external-snapshot-metadata beside it: see docs/crust-backup.md."
	}
	return "See the API server's log, and try it again."
}
