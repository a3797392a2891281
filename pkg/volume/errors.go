package volume

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Kind classifies an error by what its caller can do about it. Every error that leaves this module's inner packages has
// a kind; internal/ground/rpccode is the one place that turns it into a gRPC code.
type Kind uint8

// The kinds of error.
const (
	// Internal is a fault of ours or of the node.
	Internal Kind = iota
	// Invalid is a request that can never succeed unchanged.
	Invalid
	// Denied is a caller without permission, or a path or device that policy forbids.
	Denied
	// NotFound is a volume, or something that the request names, that does not exist.
	NotFound
	// Conflict is a target that already holds a different volume.
	Conflict
	// InUse is a device or a volume whose state does not allow the request: the device has
	// another owner; the volume is frozen already, or is not frozen.
	InUse
	// Busy is an operation to repeat a little later.
	Busy
	// Unsupported is something that the handler, or its sandbox, cannot do.
	Unsupported
	// NoSandbox is a volume that no live sandbox has now.
	NoSandbox
	// Timeout is a party that did not answer in time.
	Timeout
	// Exhausted is a full disk, or a limit that was reached.
	Exhausted
	// Malformed is an answer of a sandbox that cannot be read.
	Malformed
	// Absurd is an answer that can be read but cannot be true.
	Absurd
	// Refused is a sandbox that answered with an error of its own.
	Refused
	// OutOfRange is a size that the volume does not have and cannot get.
	OutOfRange
	// Canceled is a caller that went away.
	Canceled
)

// String is the kind's name in logs and metrics.
func (k Kind) String() string {
	names := [...]string{
		"internal", "invalid", "denied", "not-found", "conflict", "in-use", "busy",
		"unsupported", "no-sandbox", "timeout", "exhausted", "malformed", "absurd",
		"refused", "out-of-range", "canceled",
	}
	if int(k) >= len(names) {
		return "unknown"
	}
	return names[k]
}

// Error is an error with a kind. Its text is written for a person: it names the volume, the party, and what to do.
type Error struct {
	Kind Kind
	msg  string
	err  error
}

// Errorf makes an error with a kind. It wraps the operand of a single %w, as fmt.Errorf does;
// with several %w it wraps none.
func Errorf(kind Kind, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, msg: err.Error(), err: errors.Unwrap(err)}
}

// Error returns the whole text.
func (e *Error) Error() string { return e.msg }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.err }

// KindOf returns the kind of the outermost error that has one, or Internal.
func KindOf(err error) Kind {
	if classed, ok := errors.AsType[*Error](err); ok {
		return classed.Kind
	}
	return Internal
}

// DiskKind is the kind of an error of a call that writes to a filesystem.
func DiskKind(err error) Kind {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return Exhausted
	}
	return Internal
}

// ContextKind is the kind of the error of a context that ended.
func ContextKind(err error) Kind {
	if errors.Is(err, context.DeadlineExceeded) {
		return Timeout
	}
	return Canceled
}

// ErrNeverGrows is part of the error of a handler whose sandboxes can grow no filesystem that they have
// mounted: the error says nothing about the one volume.
var ErrNeverGrows = errors.New("this runtime cannot grow a filesystem while a sandbox has it mounted")
