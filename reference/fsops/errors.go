package fsops

import "errors"

// The kinds of errors that callers distinguish; every other error is a plain failure.
// Messages are for people and do not begin with the kind.
var (
	// ErrUnsupported: the filesystem or the kernel cannot do this.
	ErrUnsupported = errors.New("not supported")
	// ErrOutOfRange: the device does not have the requested size.
	ErrOutOfRange = errors.New("out of range")
	// ErrDenied: this process lacks a capability.
	ErrDenied = errors.New("not permitted")
	// ErrChanged: a directory was moved during the walk.
	ErrChanged = errors.New("changed meanwhile")
	// ErrFrozen: the filesystem is frozen already.
	ErrFrozen = errors.New("already frozen")
	// ErrNotFrozen: the filesystem is not frozen, or not any more.
	ErrNotFrozen = errors.New("not frozen")
)
