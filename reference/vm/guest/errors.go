package guest

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
)

// The kinds of errors that have a code of their own, besides those of fsops.
var (
	errNotFound    = errors.New("not found")
	errExists      = errors.New("exists already")
	errInvalid     = errors.New("invalid")
	errState       = errors.New("not in this state")
	errUnsupported = errors.New("not supported")
)

var codeOfKind = map[error]codes.Code{
	errNotFound: codes.NotFound, errExists: codes.AlreadyExists, errInvalid: codes.InvalidArgument, errState: codes.FailedPrecondition,
	errUnsupported: codes.Unimplemented, initramfs.ErrNotListed: codes.Unimplemented,
	fsops.ErrUnsupported: codes.Unimplemented, fsops.ErrOutOfRange: codes.OutOfRange,
	fsops.ErrFrozen: codes.FailedPrecondition, fsops.ErrNotFrozen: codes.FailedPrecondition,
}

func codeOf(err error) codes.Code {
	for kind, code := range codeOfKind {
		if errors.Is(err, kind) {
			return code
		}
	}
	return codes.Unknown
}

func unsupported(what string) error {
	return fmt.Errorf("%s: a container in a crust-vm guest cannot have that: %w", what, errUnsupported)
}
