// Package blocks reads which blocks of a volume's snapshot have data, or have changed since
// an earlier snapshot. It speaks CSI's SnapshotMetadata service on a driver's socket, and the
// service of the same name that external-snapshot-metadata serves in a Kubernetes cluster.
//
// What a server sends is checked before it is used: backups are made by it.
package blocks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// Type is how a server divides a volume. The numbers are the wire's.
type Type int32

// The types.
const (
	FixedLength    Type = 1
	VariableLength Type = 2
)

// Range is some bytes of a volume.
type Range struct{ Offset, Size int64 }

// End is the offset after the last byte.
func (r Range) End() int64 { return r.Offset + r.Size }

// Message is one of the messages of a stream.
type Message struct {
	Type     Type
	Capacity int64 // of the volume, in bytes
	Ranges   []Range
}

// Stream gives the next message; io.EOF is its end.
type Stream func() (Message, error)

// Source begins a stream at an offset. It is asked again when a stream breaks.
type Source func(ctx context.Context, from int64) (Stream, error)

const (
	// mostResults is how many ranges are asked for in a message: a stream that breaks has
	// lost little.
	mostResults = 1024
	// mostTries is how many streams in a row may bring nothing new.
	mostTries = 5
	firstWait = 250 * time.Millisecond
)

// Reader reads the blocks of one snapshot.
type Reader struct {
	Source Source
	// Wait is before a new stream, and doubles while streams bring nothing new; 0 is a quarter
	// of a second.
	Wait time.Duration
}

// Read calls each with every message from an offset on. Ranges ascend, lie in the volume and
// begin at the offset or later. A stream that breaks is begun again where it was. A server
// may have nothing to say, and then there is no message.
func (r *Reader) Read(ctx context.Context, from int64, each func(Message) error) error {
	seen := &checker{next: from}
	for tries := 0; ; {
		before := seen.next
		again, err := r.once(ctx, seen, each)
		if !again {
			return err
		}
		if seen.first != nil && seen.next == seen.first.Capacity {
			return nil // a server may refuse to begin at the volume's end
		}
		if tries++; seen.next > before {
			tries = 0
		}
		if tries == mostTries {
			return status.Errorf(status.Code(err), "the stream broke at byte %d, and %d tries brought no more: %s",
				seen.next, tries, status.Convert(err).Message())
		}
		if !sys.Sleep(ctx, cmp.Or(r.Wait, firstWait)<<tries) {
			return ctx.Err()
		}
	}
}

// once reads one stream, and tells whether another one may go on where it ended.
func (r *Reader) once(ctx context.Context, seen *checker, each func(Message) error) (again bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.Source(ctx, seen.next)
	if err != nil {
		return mayPass(ctx, err), err
	}
	seen.from = seen.next
	for {
		message, err := stream()
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return mayPass(ctx, err), err
		}
		if message, err = seen.check(message); err != nil {
			return false, err
		}
		if err := each(message); err != nil {
			return false, err
		}
	}
}

// mayPass tells whether an error is one that a new stream may not have. A sidecar ends a
// stream that takes long with DEADLINE_EXCEEDED.
func mayPass(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	switch status.Code(err) {
	case codes.Unavailable, codes.Aborted, codes.ResourceExhausted, codes.DeadlineExceeded, codes.Canceled:
		return true
	}
	return false
}

// ServerError is something that a server sent and CSI does not allow.
type ServerError struct{ text string }

func (e *ServerError) Error() string { return "the server broke the protocol: " + e.text }

func wrong(format string, args ...any) error {
	return &ServerError{fmt.Sprintf(format, args...)}
}

var errNoCA = errors.New("the SnapshotMetadataService has no certificate in caCert that can be read")

func notReady(namespace, name string) error {
	return fmt.Errorf("VolumeSnapshot %s/%s is not ready: see 'kubectl -n %s describe volumesnapshot %s'", namespace, name, namespace, name)
}
