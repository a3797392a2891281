package blocks_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const fixed, variable = blocks.FixedLength, blocks.VariableLength

func message(kind blocks.Type, capacity int64, numbers ...int64) blocks.Message {
	m := blocks.Message{Type: kind, Capacity: capacity}
	for pair := range slices.Chunk(numbers, 2) {
		m.Ranges = append(m.Ranges, blocks.Range{Offset: pair[0], Size: pair[1]})
	}
	return m
}

// script is a server: of each stream, what it sends, and how it ends.
type script struct {
	streams []stream
	began   []int64
}

type stream struct {
	messages []blocks.Message
	err      error
}

func (s *script) source(_ context.Context, from int64) (blocks.Stream, error) {
	s.began = append(s.began, from)
	now := s.streams[min(len(s.began), len(s.streams))-1]
	return func() (blocks.Message, error) {
		if len(now.messages) == 0 {
			return blocks.Message{}, cmp.Or(now.err, io.EOF)
		}
		next := now.messages[0]
		now.messages = now.messages[1:]
		return next, nil
	}, nil
}

// read gives the ranges that were read, as pairs.
func (s *script) read(t *testing.T, from int64) ([]int64, error) {
	t.Helper()
	var got []int64
	reader := &blocks.Reader{Source: s.source, Wait: time.Microsecond}
	err := reader.Read(t.Context(), from, func(m blocks.Message) error {
		for _, r := range m.Ranges {
			got = append(got, r.Offset, r.Size)
		}
		return nil
	})
	return got, err
}

var away = status.Error(codes.Unavailable, "away")

func TestBrokenStreamsAreResumed(t *testing.T) {
	s := &script{streams: []stream{
		{err: away},
		{messages: []blocks.Message{message(fixed, 100, 0, 10, 20, 10)}, err: away},
		{err: status.Error(codes.DeadlineExceeded, "too long")},
		// The API server is away, or overloaded.
		{err: &url.Error{Op: "Get", Err: syscall.ECONNREFUSED}}, {err: apierrors.NewTooManyRequests("later", 1)}, {err: apierrors.NewInternalError(io.EOF)},
		// It may begin before the offset that was asked for.
		{messages: []blocks.Message{message(fixed, 100, 24, 10), message(fixed, 100)}, err: away},
		{messages: []blocks.Message{message(fixed, 100, 50, 10, 96, 4)}},
	}}
	got, err := s.read(t, 0)
	check.That(t, err == nil && slices.Equal(got, []int64{0, 10, 20, 10, 30, 4, 50, 10, 96, 4}), "%v, %v", got, err)
	check.That(t, slices.Equal(s.began, []int64{0, 0, 30, 30, 30, 30, 30, 34}), "began at %v", s.began)
}

// TestNothingIsLeft breaks the stream after the last byte: a server may refuse to begin there.
func TestNothingIsLeft(t *testing.T) {
	s := &script{streams: []stream{
		{messages: []blocks.Message{message(variable, 100, 50, 50)}, err: away}, {err: status.Error(codes.OutOfRange, "beyond the end")},
	}}
	got, err := s.read(t, 0)
	check.That(t, err == nil && slices.Equal(got, []int64{50, 50}), "%v, %v after %d streams", got, err, len(s.began))
}

func TestTriesAreBounded(t *testing.T) {
	s := &script{streams: []stream{{messages: []blocks.Message{message(variable, 100, 0, 10)}, err: away}, {err: away}}}
	_, err := s.read(t, 0)
	check.That(t, status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "at byte 10, and 5 tries") && len(s.began) == 6,
		"%d streams: %v", len(s.began), err)
	// A backup waits for longer, and says so.
	s.began = nil
	var told []int64
	reader := &blocks.Reader{Source: s.source, Wait: time.Microsecond, Tries: 8, Broken: func(err error, at int64, pause time.Duration) {
		told = append(told, at)
		check.That(t, errors.Is(err, away) && pause > 0, "%v, %v", err, pause)
	}}
	err = reader.Read(t.Context(), 0, func(blocks.Message) error { return nil })
	check.That(t, status.Code(err) == codes.Unavailable && len(s.began) == 9 && slices.Equal(told, []int64{10, 10, 10, 10, 10, 10, 10, 10}),
		"%d streams, of which %v were told: %v", len(s.began), told, err)
}

func TestFinalErrorsAreNotTriedAgain(t *testing.T) {
	own := errors.New("the disk is full")
	final := []error{apierrors.NewForbidden(schema.GroupResource{}, "snap", own), &url.Error{Op: "Get", Err: errors.New("getting credentials: exec: not found")}}
	for _, code := range []codes.Code{codes.NotFound, codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied, codes.Internal} {
		final = append(final, status.Error(code, "no"))
	}
	for _, err := range final {
		s := &script{streams: []stream{{err: err}}}
		check.Is(t, check.Err(s.read(t, 0)), err)
		check.Equal(t, len(s.began), 1, "streams that end with %v", err)
	}
	s := &script{streams: []stream{{messages: []blocks.Message{message(variable, 100, 0, 10)}, err: away}}}
	reader := &blocks.Reader{Source: s.source}
	check.Is(t, reader.Read(t.Context(), 0, func(blocks.Message) error { return own }), own)
	check.Equal(t, len(s.began), 1, "streams")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s = &script{streams: []stream{{err: away}}}
	reader.Source = s.source
	err := reader.Read(ctx, 0, nil)
	check.That(t, err != nil && len(s.began) == 1, "canceled: %v after %d streams", err, len(s.began))
}

// TestHostileServer: a backup is made by what the server names.
func TestHostileServer(t *testing.T) {
	for text, sent := range map[string][]blocks.Message{
		"neither FIXED_LENGTH nor":    {message(0, 100, 0, 10)},
		"was 2 and is 1 now":          {message(variable, 100, 0, 10), message(fixed, 100, 10, 10)},
		"was 100 and is 200 now":      {message(variable, 100, 0, 10), message(variable, 200, 10, 10)},
		"volume_capacity_bytes is 0":  {message(variable, 0)},
		"0 bytes at byte 5":           {message(variable, 100, 5, 0)},
		"-1 bytes":                    {message(variable, 100, 5, -1)},
		"10 bytes at byte -1":         {message(variable, 100, -1, 10)},
		"10 bytes at byte 91":         {message(variable, 100, 91, 10)},
		"at byte 9223372036854775807": {message(variable, 100, math.MaxInt64, math.MaxInt64)},
		"after byte 20 was reached":   {message(variable, 100, 10, 10, 19, 10)},
		"after byte 40 was reached":   {message(variable, 100, 30, 10), message(variable, 100, 0, 10)},
		"has 11 bytes":                {message(fixed, 100, 0, 10, 10, 11)},
		"has 9 bytes":                 {message(fixed, 100, 0, 10, 10, 9)},
		"messages in a row":           slices.Repeat([]blocks.Message{message(variable, 100)}, 1001),
	} {
		s := &script{streams: []stream{{messages: sent}}}
		_, err := s.read(t, 0)
		var server *blocks.ServerError
		check.That(t, errors.As(err, &server) && strings.Contains(err.Error(), text), "%q: %v", text, err)
	}
	// What was asked for begins at 50.
	for _, sent := range [][]int64{{40, 10}, {0, 10}, {40, 20, 55, 10}} {
		s := &script{streams: []stream{{messages: []blocks.Message{message(variable, 100, sent...)}}}}
		got, err := s.read(t, 50)
		check.That(t, err != nil, "%v from 50 on gave %v", sent, got)
	}
}

// TestServersThatBehave: what CSI allows is taken.
func TestServersThatBehave(t *testing.T) {
	for _, sent := range [][]blocks.Message{
		nil,
		{message(variable, 1)},
		{message(variable, 100, 0, 100)},
		{message(variable, 100, 0, 1), message(variable, 100), message(variable, 100, 1, 99)},
		{message(fixed, 95, 0, 10, 10, 10, 90, 5)},
		{message(variable, math.MaxInt64, math.MaxInt64-1, 1)},
	} {
		s := &script{streams: []stream{{messages: sent}}}
		check.NoError(t, check.Err(s.read(t, 0)), "%v", sent)
	}
	s := &script{streams: []stream{{messages: []blocks.Message{message(variable, 100, 0, 100)}}}}
	got, err := s.read(t, 50)
	check.That(t, err == nil && slices.Equal(got, []int64{50, 50}), "%v, %v", got, err)
}

// oneBlock is a driver whose snapshots have one block.
type oneBlock struct {
	csi.UnimplementedSnapshotMetadataServer
}

func (oneBlock) GetMetadataAllocated(_ *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	return stream.Send(&csi.GetMetadataAllocatedResponse{
		BlockMetadataType: csi.BlockMetadataType_FIXED_LENGTH, VolumeCapacityBytes: 100, BlockMetadata: []*csi.BlockMetadata{{SizeBytes: 10}},
	})
}

// TestAServerThatIsStartedAgain has nobody at the socket until the stream broke some times.
func TestAServerThatIsStartedAgain(t *testing.T) {
	socket := t.TempDir() + "/csi.sock"
	check.StaleSocket(t, socket)
	conn := check.Value(blocks.DialCSI(socket))(t)
	defer func() { check.Must(t, conn.Close()) }()
	server := grpc.NewServer()
	defer server.Stop()
	csi.RegisterSnapshotMetadataServer(server, oneBlock{})
	broken, got := 0, int64(0)
	reader := &blocks.Reader{Source: blocks.FromCSI(conn, "", "snapshot", nil), Wait: 50 * time.Millisecond, Tries: blocks.MinutesOfTries, Broken: func(error, int64, time.Duration) {
		if broken++; broken == 3 {
			check.Must(t, os.Remove(socket))
			listener := check.Value(net.Listen("unix", socket))(t)
			go func() { _ = server.Serve(listener) }()
		}
	}}
	err := reader.Read(t.Context(), 0, func(m blocks.Message) error { got = m.Ranges[0].End(); return nil })
	check.That(t, err == nil && broken >= 3 && got == 10, "%d streams broke, and byte %d was reached: %v", broken, got, err)
}
