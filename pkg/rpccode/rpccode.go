// Package rpccode is the one place where classed errors become gRPC codes, at the
// edge, for every server of this module.
package rpccode

import (
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// codeOf is the whole table. What kubelet does next depends on it: it takes
// only Canceled, DeadlineExceeded, Unavailable, ResourceExhausted and Aborted
// for "this may have happened", and after any other error on a first publish it
// never calls Unpublish. So the kinds behind the other codes are given only when
// nothing is left of the attempt.
var codeOf = map[deferral.Kind]codes.Code{
	deferral.Internal:    codes.Internal,
	deferral.Invalid:     codes.InvalidArgument,
	deferral.Denied:      codes.PermissionDenied,
	deferral.NotFound:    codes.NotFound,
	deferral.Conflict:    codes.AlreadyExists,
	deferral.InUse:       codes.FailedPrecondition,
	deferral.Busy:        codes.Aborted,
	deferral.Unsupported: codes.Unimplemented,
	deferral.NoSandbox:   codes.Unavailable,
	deferral.Timeout:     codes.DeadlineExceeded,
	deferral.Exhausted:   codes.ResourceExhausted,
	deferral.Malformed:   codes.DataLoss,
	deferral.Absurd:      codes.DataLoss,
	deferral.OutOfRange:  codes.OutOfRange,
	deferral.Refused:     codes.Unknown,
	deferral.Canceled:    codes.Canceled,
}

// Status turns an error of the inner packages into one for the wire.
func Status(err error) error {
	if err == nil {
		return nil
	}
	var classed *deferral.Error
	if !errors.As(err, &classed) {
		if _, ok := status.FromError(err); ok {
			return err
		}
	}
	code, ok := codeOf[deferral.KindOf(err)]
	if !ok {
		code = codes.Internal
	}
	return status.Error(code, err.Error())
}
