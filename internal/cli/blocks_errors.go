package cli

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/blocks"
	"github.com/crust-proxy/crust-proxy/internal/cli/show"
)

// blockAdvice is what to do about the answers that CSI's SnapshotMetadata gives.
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

// explainBlocks says what the error of a stream means and what to do.
func explainBlocks(ctx context.Context, err error) error {
	var server *blocks.ServerError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case errors.As(err, &server):
		return &explained{err, "Nothing was used of that message. The driver is at fault: tell its author."}
	}
	st, ofCall := status.FromError(err)
	if !ofCall {
		return err
	}
	return &explained{fmt.Errorf("%s (%s)", show.Escape(st.Message()), st.Code()), blockAdvice[st.Code()]}
}
