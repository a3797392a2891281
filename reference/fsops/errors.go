package fsops

import "errors"

// The classes of errors that a caller tells apart; every other error is a plain
// failure. Messages are for people and do not begin with the class.
var (
	// ErrUnsupported: this filesystem or kernel cannot do it.
	ErrUnsupported = errors.New("not supported")
	// ErrOutOfRange: the device has not the size that is asked for.
	ErrOutOfRange = errors.New("out of range")
	// ErrDenied: this process lacks a capability.
	ErrDenied = errors.New("not permitted")
	// ErrChanged: somebody moved directories while they were walked through.
	ErrChanged = errors.New("changed meanwhile")
	// ErrFrozen: the filesystem is frozen already.
	ErrFrozen = errors.New("already frozen")
	// ErrNotFrozen: the filesystem is not frozen, or not any more.
	ErrNotFrozen = errors.New("not frozen")
)
