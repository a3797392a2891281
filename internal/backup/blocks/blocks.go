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
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
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
	// mostResults is how many ranges are requested per message, so that little is lost when a stream breaks.
	mostResults = 1024
	// fewTries is how many streams in a row may break without progress, if Reader does not say.
	fewTries  = 5
	firstWait = 250 * time.Millisecond
	mostWait  = 10 * time.Second
)

// badCertificate is how an error of the package crypto/tls begins, of which gRPC has only the text.
const badCertificate = "tls: failed to verify certificate"

// IsCertificate reports whether an error is that of a server whose certificate is not accepted.
func IsCertificate(err error) bool { return strings.Contains(err.Error(), badCertificate) }

// MinutesOfTries is the number of Reader's tries that gives a server about five minutes to restart.
const MinutesOfTries = 35

// reconnect lets gRPC connect again within seconds, as often as a stream is begun again.
func reconnect() grpc.DialOption {
	return grpc.WithConnectParams(grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: firstWait, Multiplier: 2, Jitter: 0.2, MaxDelay: mostWait / 2},
		MinConnectTimeout: 2 * mostWait,
	})
}

// Reader reads the blocks of one snapshot.
type Reader struct {
	Source Source
	// Wait is the pause before a new stream. It doubles while there is no progress, up to ten
	// seconds. 0 is a quarter of a second.
	Wait time.Duration
	// Tries is how many streams in a row may break without progress. 0 is a few.
	Tries int
	// Broken, if it is set, is called for each stream that broke, before the pause.
	Broken func(err error, at int64, pause time.Duration)
}

// Read calls each with every message from an offset on. Ranges ascend, are inside the volume and begin at the offset or
// later. A stream that breaks is resumed. If the server has nothing to report, there may be no message.
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
		if tries == cmp.Or(r.Tries, fewTries) {
			return status.Errorf(status.Code(err), "the stream broke at byte %d, and %d tries brought no more: %s",
				seen.next, tries, status.Convert(err).Message())
		}
		pause := min(cmp.Or(r.Wait, firstWait)<<min(tries, 10), mostWait)
		if r.Broken != nil {
			r.Broken(err, seen.next, pause)
		}
		if !sys.Sleep(ctx, pause) {
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

// mayPass reports whether a new stream may succeed after an error, also one of the API server's. The sidecar
// ends a stream that takes long with DEADLINE_EXCEEDED.
func mayPass(ctx context.Context, err error) bool {
	if ctx.Err() != nil || IsCertificate(err) || strings.Contains(err.Error(), "getting credentials: ") { // by a kubeconfig's program
		return false
	}
	var answer apierrors.APIStatus
	if errors.As(err, &answer) {
		code := answer.Status().Code
		return code == http.StatusTooManyRequests || code >= http.StatusInternalServerError
	}
	var network net.Error
	return errors.As(err, &network) || slices.Contains(passing, status.Code(err))
}

var passing = []codes.Code{codes.Unavailable, codes.Aborted, codes.ResourceExhausted, codes.DeadlineExceeded, codes.Canceled}

// ServerError means that a server sent something that CSI does not allow.
type ServerError struct{ text string }

func (e *ServerError) Error() string { return "the server broke the protocol: " + e.text }

func wrong(format string, args ...any) error { return &ServerError{fmt.Sprintf(format, args...)} }

var errNoCA = errors.New("the SnapshotMetadataService has no certificate in caCert that can be read")

func notReady(namespace, name string) error {
	return fmt.Errorf("VolumeSnapshot %s/%s is not ready: see 'kubectl -n %s describe volumesnapshot %s'", namespace, name, namespace, name)
}

func replaced(namespace, name, was, is string) error {
	return fmt.Errorf("VolumeSnapshot %s/%s is another snapshot now, %q instead of %q: begin anew", namespace, name, is, was)
}

func otherDriver(namespace, name, has, target string) error {
	return fmt.Errorf("VolumeSnapshot %s/%s is of driver %s, not of %s: the base must be an earlier snapshot of the same volume", namespace, name, has, target)
}

func apiAudience(namespace, account, audience string) error {
	return fmt.Errorf("the SnapshotMetadataService asks for tokens with the audience %q, which the API server accepts too: the server at its address could use "+
		"the API as service account %s/%s. No token was sent: give the service an audience of its own, and find out who wrote the object", audience, namespace, account)
}

func unknownAudience(audience string) error {
	return fmt.Errorf("the API server does not say which audiences it accepts itself, so it is not known whether it accepts tokens with the "+
		"audience %q of the SnapshotMetadataService, and none was sent", audience)
}
