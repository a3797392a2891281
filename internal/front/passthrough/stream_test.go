package passthrough

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/crust-proxy/crust-proxy/test/check"
)

const anyMethod = "/vendor.v1.Service/Talk"

// TestTalk: each message gets through before the next one is sent, empty ones too.
func TestTalk(t *testing.T) {
	t.Parallel()
	r := newRig(t, parts{driver: raw(echo)})
	stream := open(patience(t), t, r.proxied, anyMethod)
	for n, message := range []string{"one", "", strings.Repeat("three", 1<<16), ""} {
		send(t, stream, message)
		var got []byte
		err := stream.RecvMsg(&got)
		check.Require(t, err == nil && string(got) == message, "message %d came back with %d bytes, %v", n, len(got), err)
	}
	check.Must(t, stream.CloseSend())
	rest, err := all(stream)
	check.That(t, len(rest) == 0 && err == nil, "after the end: %q, %v", rest, err)
}

// TestAroundStreams: headers before any message, and the last word with all that belongs to it.
func TestAroundStreams(t *testing.T) {
	t.Parallel()
	failed, proceed := failure(t), make(chan struct{}, 2)
	r := newRig(t, parts{driver: raw(func(_ any, s grpc.ServerStream) error {
		if err := s.SendHeader(metadata.Pairs("h", "1", "h-bin", "\x00\xff")); err != nil {
			return err
		}
		<-proceed // neither side has sent a message yet
		s.SetTrailer(metadata.Pairs("t", "1"))
		return errors.Join(s.SendMsg(message("but one")), failed)
	})})
	var got []outcome
	for _, conn := range []*grpc.ClientConn{r.direct, r.proxied} {
		stream := open(patience(t), t, conn, anyMethod)
		header := check.Value(stream.Header())(t)
		proceed <- struct{}{}
		messages, err := all(stream)
		got = append(got, outcome{strings.Join(messages, "|"), header, stream.Trailer(), status.Convert(err).Proto()})
	}
	diff := cmp.Diff(got[0], got[1], protocmp.Transform())
	check.That(t, diff == "" && got[0].Header.Get("h") != nil, "(-direct +proxied):\n%s\n%+v", diff, got[0])
}

// TestDriverEnds in the middle of a stream, with a word of its own or by dying: the caller is not kept waiting.
func TestDriverEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t, parts{driver: raw(func(srv any, s grpc.ServerStream) error {
		if method, _ := grpc.MethodFromServerStream(s); method == anyMethod {
			return echo(srv, s)
		}
		return errors.Join(s.RecvMsg(new([]byte)), status.Error(codes.OutOfRange, "enough"))
	})})
	stream := open(patience(t), t, r.proxied, "/vendor.v1.Service/Enough")
	send(t, stream, "first")
	check.Code(t, check.Err(all(stream)), codes.OutOfRange)
	stream = open(patience(t), t, r.proxied, anyMethod)
	send(t, stream, "first")
	check.Must(t, stream.RecvMsg(new([]byte)))
	r.driver.Stop()
	check.Code(t, check.Err(all(stream)), codes.Unavailable)
	for way, method := range threeWays() { // and nobody is at the socket any more
		_, err := ask(patience(t), r.proxied, method, nil)
		check.That(t, status.Code(err) == codes.Unavailable, "%s: %v", way, err)
	}
}

// TestCallerDies in the middle of a stream, by cancelling and by its connection: the driver's call is cancelled.
func TestCallerDies(t *testing.T) {
	t.Parallel()
	for name, die := range map[string]func(*rig, context.CancelFunc){
		"cancelled": func(_ *rig, cancel context.CancelFunc) { cancel() },
		"gone":      func(r *rig, _ context.CancelFunc) { _ = r.proxied.Close() },
	} {
		ended := make(chan struct{})
		r := newRig(t, parts{driver: raw(func(srv any, s grpc.ServerStream) error {
			err := echo(srv, s)
			<-s.Context().Done()
			close(ended)
			return err
		})})
		ctx, cancel := context.WithCancel(patience(t))
		stream := open(ctx, t, r.proxied, anyMethod)
		send(t, stream, "first")
		check.Must(t, stream.RecvMsg(new([]byte)))
		die(r, cancel)
		waitFor(t, name+": the driver's call ends", ended)
		cancel()
	}
}

// broken fails to read the caller's side.
type broken struct{ grpc.ServerStream }

func (broken) RecvMsg(any) error {
	return status.Error(codes.Unimplemented, "compressed in an unknown way")
}

// TestUnreadableCaller: what is wrong with the caller's side is said to it, and
// not that the driver was cancelled for it.
func TestUnreadableCaller(t *testing.T) {
	t.Parallel()
	r := newRig(t, parts{driver: raw(echo), proxy: []grpc.ServerOption{
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			return handle(srv, broken{s})
		}),
	}})
	check.Code(t, check.Err(all(open(patience(t), t, r.proxied, anyMethod))), codes.Unimplemented)
}

// tooMuch is more than any window that gRPC opens by itself.
const (
	chunk   = 64 << 10
	tooMuch = 64 << 20 / chunk
)

// TestBackpressure: a side that does not read stops the other one.
func TestBackpressure(t *testing.T) {
	t.Parallel()
	t.Run("on the driver", func(t *testing.T) {
		t.Parallel()
		var sent atomic.Int64
		r := newRig(t, parts{driver: raw(func(_ any, s grpc.ServerStream) error { return flood(s, &sent) })})
		stream := open(patience(t), t, r.proxied, anyMethod)
		stalls(t, &sent)
		messages, err := all(stream)
		check.That(t, err == nil && len(messages) == tooMuch, "%d messages, %v", len(messages), err)
	})
	t.Run("on the caller", func(t *testing.T) {
		t.Parallel()
		var sent atomic.Int64
		read := make(chan struct{})
		r := newRig(t, parts{driver: raw(func(_ any, s grpc.ServerStream) error { <-read; _, err := all(s); return err })})
		stream := open(patience(t), t, r.proxied, anyMethod)
		flooded := check.Begin(func() error { return errors.Join(flood(stream, &sent), stream.CloseSend()) })
		stalls(t, &sent)
		close(read)
		_, err := all(stream)
		check.Must(t, errors.Join(<-flooded, err))
	})
}

func flood(stream sender, sent *atomic.Int64) error {
	data := make([]byte, chunk)
	for range tooMuch {
		if err := stream.SendMsg(&data); err != nil {
			return err
		}
		sent.Add(1)
	}
	return nil
}

// stalls waits until no more is sent, and fails when that is at the end.
func stalls(t *testing.T, sent *atomic.Int64) {
	t.Helper()
	for last, deadline := int64(-1), time.Now().Add(5*time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		now := sent.Load()
		if now > 0 && now == last {
			break
		}
		last = now
	}
	held := sent.Load() * chunk
	check.That(t, held < 8<<20, "%d bytes are on their way to a side that does not read", held)
}
