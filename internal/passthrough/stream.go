package passthrough

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
)

// anyStream is how a method is called of which nothing is known.
var anyStream = grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

// stream passes a call of any form. Each side is read only as fast as the other
// one takes it: one message is held, and gRPC's windows do the rest.
func (c *call) stream() error {
	ctx, cancel := context.WithCancelCause(c.ctx)
	// The goroutine reads the caller's side until this handler returns, so it
	// cannot be waited for: gRPC ends that read when the handler has ended.
	defer cancel(nil)
	driver, err := c.conn.NewStream(ctx, &anyStream, c.method, c.options()...)
	if err != nil {
		return err
	}
	go func() {
		if err := c.pump(driver); err != nil {
			cancel(err)
		}
	}()
	err = c.answer(driver)
	if cause := context.Cause(ctx); err != nil && cause != nil && c.ctx.Err() == nil {
		return cause // the driver was cancelled because the caller's side failed
	}
	return err
}

// pump hands the caller's messages to the driver until the caller has no more.
func (c *call) pump(driver grpc.ClientStream) error {
	for {
		err := move(c.caller, driver)
		if errors.Is(err, errEnd) {
			return driver.CloseSend()
		}
		if errors.Is(err, io.EOF) {
			return nil // the driver has ended; its status comes on the other way
		}
		if err != nil {
			return err
		}
	}
}

// answer hands the driver's messages to the caller, and its last word.
func (c *call) answer(driver grpc.ClientStream) error {
	header, err := driver.Header()
	if header != nil && err == nil {
		// At once: the caller may wait for it before it sends anything.
		err = c.caller.SendHeader(ofCall(header))
	}
	if err != nil {
		return err
	}
	for {
		frame := &Frame{}
		if err := driver.RecvMsg(frame); err != nil {
			c.caller.SetTrailer(driver.Trailer())
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		err := c.caller.SendMsg(frame)
		frame.Free()
		if err != nil {
			return err
		}
	}
}

// errEnd is the end of the side that is read, where io.EOF could as well be that
// of the side that is written.
var errEnd = errors.New("there are no more messages")

// receiver and sender are the halves of a stream, of either side.
type (
	receiver interface{ RecvMsg(message any) error }
	sender   interface{ SendMsg(message any) error }
)

// move takes one message from one side to the other.
func move(from receiver, to sender) error {
	frame := &Frame{}
	if err := from.RecvMsg(frame); errors.Is(err, io.EOF) {
		return errEnd
	} else if err != nil {
		return err
	}
	defer frame.Free()
	return to.SendMsg(frame)
}
