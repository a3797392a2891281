package guest

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
)

// The classes of errors that the host tells apart, beside those of fsops.
var (
	errUnknown  = errors.New("there is no such")
	errExists   = errors.New("there is one already")
	errInvalid  = errors.New("invalid")
	errState    = errors.New("not in this state")
	errNotKnown = errors.New("not supported")
)

var codeOfClass = map[error]codes.Code{
	errUnknown: codes.NotFound, errExists: codes.AlreadyExists, errInvalid: codes.InvalidArgument, errState: codes.FailedPrecondition,
	errNotKnown: codes.Unimplemented, initramfs.ErrNotListed: codes.Unimplemented,
	fsops.ErrUnsupported: codes.Unimplemented, fsops.ErrOutOfRange: codes.OutOfRange,
	fsops.ErrFrozen: codes.FailedPrecondition, fsops.ErrNotFrozen: codes.FailedPrecondition,
}

// codeOf gives the code of an error on the wire.
func codeOf(err error) codes.Code {
	for class, code := range codeOfClass {
		if errors.Is(err, class) {
			return code
		}
	}
	return codes.Unknown
}

func unsupported(what string) error {
	return fmt.Errorf("%s: a container in a crust-vm guest cannot have that: %w", what, errNotKnown)
}
