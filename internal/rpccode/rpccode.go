// Package rpccode is the one place where classed errors become gRPC codes, at the
// edge, for every server of this module.
package rpccode

import (
	"cmp"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// codeOf is the whole table. What kubelet does next depends on it: it takes
// only Canceled, DeadlineExceeded, Unavailable, ResourceExhausted and Aborted
// for "this may have happened", and after any other error on a first publish it
// never calls Unpublish. So the kinds behind the other codes are given only when
// nothing is left of the attempt.
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

// Status turns an error of the inner packages into one for the wire.
func Status(err error) error {
	if err == nil {
		return nil
	}
	var classed *volume.Error
	if !errors.As(err, &classed) {
		if _, ok := status.FromError(err); ok {
			return err
		}
	}
	return status.Error(cmp.Or(codeOf[volume.KindOf(err)], codes.Internal), err.Error())
}
