// Package blocks reads which blocks of a volume's snapshot have data, or have changed since
// an earlier snapshot. It asks CSI's SnapshotMetadata service on a driver's socket, or the
// service of the same name that external-snapshot-metadata serves in a Kubernetes cluster.
//
// What a server sends is checked before it is used, because backups depend on it.
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

// Range is a range of bytes of a volume.
type Range struct{ Offset, Size int64 }

// End is the offset after the last byte.
func (r Range) End() int64 { return r.Offset + r.Size }

// Message is one of the messages of a stream.
type Message struct {
	Type     Type
	Capacity int64 // of the volume, in bytes
	Ranges   []Range
}

// Stream returns the next message, and io.EOF after the last one.
type Stream func() (Message, error)

// Source starts a stream at an offset. It is called again when a stream breaks.
type Source func(ctx context.Context, from int64) (Stream, error)

const (
	// mostResults is how many ranges are requested per message, so that little is lost when a
	// stream breaks.
	mostResults = 1024
	// mostTries is how many streams in a row may break without progress.
	mostTries = 5
	firstWait = 250 * time.Millisecond
)

// Reader reads the blocks of one snapshot.
type Reader struct {
	Source Source
	// Wait is the pause before a new stream. It doubles while there is no progress. 0 is a
	// quarter of a second.
	Wait time.Duration
}

// Read calls each with every message from an offset on. Ranges ascend, are inside the volume
// and begin at the offset or later. A stream that breaks is resumed. If the server has nothing
// to report, there may be no message.
func (r *Reader) Read(ctx context.Context, from int64, each func(Message) error) error {
	seen := &checker{next: from}
	for tries := 0; ; {
		before := seen.next
		again, err := r.once(ctx, seen, each)
		if !again {
			return err
		}
		if seen.first != nil && seen.next == seen.first.Capacity {
			return nil // a server may refuse to start at the volume's end
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

// once reads one stream, and reports whether another one may resume it.
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

// mayPass reports whether a new stream may succeed after an error. The sidecar ends a stream
// that takes long with DEADLINE_EXCEEDED.
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

// ServerError means that a server sent something that CSI does not allow.
type ServerError struct{ text string }

func (e *ServerError) Error() string { return "the server broke the protocol: " + e.text }

func wrong(format string, args ...any) error {
	return &ServerError{fmt.Sprintf(format, args...)}
}

var errNoCA = errors.New("the SnapshotMetadataService has no certificate in caCert that can be read")

func notReady(namespace, name string) error {
	return fmt.Errorf("VolumeSnapshot %s/%s is not ready: see 'kubectl -n %s describe volumesnapshot %s'", namespace, name, namespace, name)
}
