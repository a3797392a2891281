// Package rpccode maps classed errors to gRPC codes, for every server of this module.
package rpccode

import (
	"cmp"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// codeOf is the whole table. What kubelet does next depends on it: only Canceled, DeadlineExceeded, Unavailable,
// ResourceExhausted and Aborted mean to it that the call may have had an effect. After any other error of a first
// publish it never calls Unpublish. So errors of the other kinds are returned only if nothing is left of the call.
var codeOf = map[volume.Kind]codes.Code{
	volume.Internal:    codes.Internal,
	volume.Invalid:     codes.InvalidArgument,
	volume.Denied:      codes.PermissionDenied,
	volume.NotFound:    codes.NotFound,
	volume.Conflict:    codes.AlreadyExists,
	volume.InUse:       codes.FailedPrecondition,
	volume.Busy:        codes.Aborted,
	volume.Unsupported: codes.Unimplemented,
	volume.NoSandbox:   codes.Unavailable,
	volume.Timeout:     codes.DeadlineExceeded,
	volume.Exhausted:   codes.ResourceExhausted,
	volume.Malformed:   codes.DataLoss,
	volume.Absurd:      codes.DataLoss,
	volume.OutOfRange:  codes.OutOfRange,
	volume.Refused:     codes.Unknown,
	volume.Canceled:    codes.Canceled,
}

// inner is what gRPC writes before the text of a status error.
var inner = sys.LazyRegexp(`rpc error: code = \w+ desc = `)

// Status converts an error to a gRPC status error. One that is a status already keeps its code,
// unless it is wrapped in a classed error. The codes of wrapped errors are removed from the text.
func Status(err error) error {
	if err == nil {
		return nil
	}
	known, ok := status.FromError(err)
	if _, classed := errors.AsType[*volume.Error](err); !ok || classed {
		known = status.New(cmp.Or(codeOf[volume.KindOf(err)], codes.Internal), err.Error())
	}
	plain := known.Proto()
	plain.Message = inner().ReplaceAllString(plain.GetMessage(), "")
	return status.FromProto(plain).Err()
}
