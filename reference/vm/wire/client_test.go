package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/ttrpc"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// A liar is a guest that answers each call with what the test gave it, or never: by method, a message or an error.
type liar map[string]any

func (l liar) method(name string) ttrpc.Method {
	return func(ctx context.Context, _ func(any) error) (any, error) {
		switch said := l[name].(type) {
		case proto.Message:
			return said, nil
		case error:
			return nil, said
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
}

func (l liar) register(s *ttrpc.Server) {
	services := File_wire_proto.Services()
	for i := range services.Len() {
		service, methods := &ttrpc.ServiceDesc{Methods: make(map[string]ttrpc.Method)}, services.Get(i).Methods()
		for j := range methods.Len() {
			name := string(methods.Get(j).Name())
			service.Methods[name] = l.method(name)
		}
		s.RegisterService(string(services.Get(i).FullName()), service)
	}
}

// connected is both ends of a unix socket.
func connected(t *testing.T) (host, guest net.Conn) {
	t.Helper()
	listener := check.Value(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	defer func() { _ = listener.Close() }()
	host = check.Value(net.Dial("unix", listener.Addr().String()))(t)
	guest = check.Value(listener.Accept())(t)
	t.Cleanup(func() { _ = host.Close(); _ = guest.Close() })
	return host, guest
}

func ask(t *testing.T, l liar) *Client {
	t.Helper()
	listener := check.Value(net.Listen("unix", filepath.Join(t.TempDir(), "s")))(t)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = Serve(context.WithoutCancel(t.Context()), listener, status.Code, l.register)
	}()
	c := NewClient(check.Value(net.Dial("unix", listener.Addr().String()))(t))
	t.Cleanup(func() { _ = c.Close(); _ = listener.Close(); <-ended })
	return c
}

func bytesUsage(total, used, available int64) *Usage {
	return &Usage{Unit: abi.UnitBytes, Total: total, Used: used, Available: available}
}

// question asks one thing of a client and gives only the error.
type question func(context.Context, *Client) error

func asks[Request, Answer any](call func(*Client, context.Context, Request) (Answer, error), req Request) question {
	return func(ctx context.Context, c *Client) error { return check.Err(call(c, ctx, req)) }
}

var (
	shutdown  = asks((*Client).Shutdown, &ShutdownRequest{})
	addVolume = asks((*Client).AddVolume, &AddVolumeRequest{})
	stats     = asks((*Client).GetVolumeStats, &GetVolumeStatsRequest{})
	resize    = asks((*Client).ResizeVolume, &ResizeVolumeRequest{})
	wait      = asks((*Client).WaitProcess, &WaitProcessRequest{})
	read      = asks((*Client).ReadOutput, &ReadOutputRequest{Max: 10})
	write     = asks((*Client).WriteInput, &WriteInputRequest{Data: []byte("1234")})
	ping      = asks((*Client).Ping, &PingRequest{})
)

// TestLiesAreNotBelieved: each false answer is refused, and the true one beside it is not.
func TestLiesAreNotBelieved(t *testing.T) {
	long, lines := strings.Repeat("x", maxText+1), "one\ntwo"
	for method, c := range map[string]struct {
		ask   question
		truth []proto.Message
		lies  []proto.Message
	}{
		"Ping": {ping,
			[]proto.Message{&PingResponse{Protocol: Protocol}},
			[]proto.Message{&PingResponse{}, &PingResponse{Protocol: Protocol + 1}, &PingResponse{Protocol: math.MaxUint32}}},
		"Shutdown": {shutdown,
			[]proto.Message{&ShutdownResponse{}, &ShutdownResponse{Errors: []string{"the volume is busy"}}},
			[]proto.Message{&ShutdownResponse{Errors: make([]string, 65)}, &ShutdownResponse{Errors: []string{long}}}},
		"AddVolume": {addVolume,
			[]proto.Message{&AddVolumeResponse{}, &AddVolumeResponse{Warning: "it did not grow"}},
			[]proto.Message{&AddVolumeResponse{Warning: lines}, &AddVolumeResponse{Warning: long}}},
		"GetVolumeStats": {stats,
			[]proto.Message{
				&GetVolumeStatsResponse{}, &GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(10, 4, 6)}},
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(math.MaxInt64, math.MaxInt64, 0), {Unit: abi.UnitInodes, Total: 3}}},
				&GetVolumeStatsResponse{Abnormal: true, Reason: abi.ReasonReadOnly, Message: "it is read-only"},
			},
			[]proto.Message{
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(-1, 0, 0)}},
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(10, -4, 6)}},
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(10, 4, math.MinInt64)}},
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(10, 11, 0)}},
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(10, 6, 6)}},
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(math.MaxInt64, math.MaxInt64, math.MaxInt64)}}, // the sum overflows
				&GetVolumeStatsResponse{Usage: []*Usage{bytesUsage(1, 0, 0), bytesUsage(1, 0, 0)}},
				&GetVolumeStatsResponse{Usage: []*Usage{{Unit: "KITTENS", Total: 1}}},
				&GetVolumeStatsResponse{Abnormal: true, Reason: "Haunted"},
				&GetVolumeStatsResponse{Abnormal: true},
				&GetVolumeStatsResponse{Reason: abi.ReasonReadOnly},
				&GetVolumeStatsResponse{Message: lines},
			}},
		"WaitProcess": {wait,
			[]proto.Message{&WaitProcessResponse{}, &WaitProcessResponse{ExitCode: 255, OomKilled: true}},
			[]proto.Message{&WaitProcessResponse{ExitCode: 256}, &WaitProcessResponse{ExitCode: math.MaxUint32}}},
		"ReadOutput": {read,
			[]proto.Message{&ReadOutputResponse{}, &ReadOutputResponse{Data: make([]byte, 10)}},
			[]proto.Message{&ReadOutputResponse{Data: make([]byte, 11)}, &ReadOutputResponse{Data: make([]byte, MaxData)}}},
		"WriteInput": {write,
			[]proto.Message{&WriteInputResponse{}, &WriteInputResponse{Written: 4}},
			[]proto.Message{&WriteInputResponse{Written: 5}, &WriteInputResponse{Written: math.MaxUint32}}},
	} {
		l := make(liar)
		client := ask(t, l)
		for _, truth := range c.truth {
			l[method] = truth
			check.NoError(t, c.ask(t.Context(), client), "%s: {%v} is true, and was refused", method, truth)
		}
		for _, lie := range c.lies {
			l[method] = lie
			err := c.ask(t.Context(), client)
			check.That(t, errors.Is(err, ErrBroken) && strings.Contains(err.Error(), method), "%s: {%.100v} was taken, with %v", method, lie, err)
		}
	}
}

// TestErrorsOfTheGuestFitALog: what it says is one short line without control characters,
// and begins with whose words they are.
func TestErrorsOfTheGuestFitALog(t *testing.T) {
	l := make(liar)
	client := ask(t, l)
	for _, said := range []string{"", "plain", "two\nlines", "\x1b[31mred\x07", strings.Repeat("ü", 50_000)} {
		l["GetVolumeStats"] = status.Error(codes.FailedPrecondition, said)
		err := stats(t.Context(), client)
		text := status.Convert(err).Message()
		check.That(t, status.Code(err) == codes.FailedPrecondition && strings.HasPrefix(text, "the guest: ") && len(text) <= maxText+20 &&
			!strings.ContainsAny(text, "\n\x1b\x07"), "%.20q became %.80q (%v, %d bytes)", said, text, status.Code(err), len(text))
	}
	l["GetVolumeStats"] = status.ErrorProto(&rpcstatus.Status{Code: 9999, Message: "x"})
	err := stats(t.Context(), client)
	check.That(t, status.Code(err) == codes.Unknown, "a code that is none became %v", status.Code(err))
}

func frame(stream uint32, kind byte, body []byte) []byte {
	out := binary.BigEndian.AppendUint32(nil, uint32(len(body))) //nolint:gosec // a test's
	out = binary.BigEndian.AppendUint32(out, stream)
	return append(append(out, kind, 0), body...)
}

// response is a whole answer.
func response(t *testing.T, message proto.Message) []byte {
	t.Helper()
	payload := check.Value(proto.Marshal(message))(t)
	return check.Value(proto.Marshal(&ttrpc.Response{Payload: payload}))(t)
}

// TestFramesThatBreakTheWire: the first of them ends the connection, and all calls with it.
func TestFramesThatBreakTheWire(t *testing.T) {
	good := response(t, &PingResponse{Protocol: Protocol})
	tooLong := binary.BigEndian.AppendUint32(nil, MaxFrame+1)
	huge := binary.BigEndian.AppendUint32(nil, math.MaxUint32)
	for name, sent := range map[string][]byte{
		"an answer that nobody asked for": frame(4711, typeResponse, good),
		"two answers":                     append(frame(1, typeResponse, good), frame(1, typeResponse, good)...),
		"a question":                      frame(1, typeRequest, good),
		"a piece of a stream":             frame(1, 3, good),
		"a frame of no type":              frame(1, 0, good),
		"a long frame":                    append(tooLong, 0, 0, 0, 1, typeResponse, 0),
		"a frame of 4 GiB":                append(huge, 0, 0, 0, 1, typeResponse, 0),
		"garbage":                         bytes.Repeat([]byte("crust"), 1000),
	} {
		t.Run(name, func(t *testing.T) {
			host, guest := connected(t)
			c := NewClient(host)
			defer func() { _ = c.Close() }()
			ctx := check.Within(t, 20*time.Second)
			blocked := check.Begin(func() error { return ping(ctx, c) })
			check.Value(io.ReadFull(guest, make([]byte, headerSize)))(t) // it has been asked
			go func() { _, _ = guest.Write(sent); _, _ = io.Copy(io.Discard, guest) }()
			select {
			case <-c.Done():
			case <-ctx.Done():
				t.Fatal("the connection goes on")
			}
			if err := <-blocked; err == nil && name != "two answers" { // the first may have been read alone
				t.Error("the call was answered")
			}
			check.That(t, ping(ctx, c) != nil, "another call is answered")
		})
	}
}

// TestAnAnswerThatIsNone: the body of a good frame can be anything.
func TestAnAnswerThatIsNone(t *testing.T) {
	bad := check.Value(proto.Marshal(&ttrpc.Response{Payload: []byte("\xff\xff\xff")}))(t)
	for _, body := range [][]byte{[]byte("\xff\xff\xff"), bad} {
		host, guest := connected(t)
		c := NewClient(host)
		go func() {
			_, _ = io.ReadFull(guest, make([]byte, headerSize))
			_, _ = guest.Write(frame(1, typeResponse, body))
		}()
		check.That(t, stats(t.Context(), c) != nil, "%q is an answer", body)
		_ = c.Close()
	}
}

// TestDeathOfTheGuest ends all calls, also those without a deadline, in the middle of an answer.
func TestDeathOfTheGuest(t *testing.T) {
	host, guest := connected(t)
	c := NewClient(host)
	defer func() { _ = c.Close() }()
	questions := []question{wait, read, stats}
	ended := make(chan error, len(questions))
	for _, one := range questions {
		go func() { ended <- one(t.Context(), c) }()
	}
	check.Value(io.ReadFull(guest, make([]byte, headerSize)))(t)
	check.Must(t, check.Err(guest.Write(frame(1, typeResponse, make([]byte, 100))[:50])))
	check.Must(t, guest.Close())
	for range questions {
		check.That(t, <-ended != nil, "a dead guest has answered")
	}
	<-c.Done()
}

// inTime runs a test with a clock of its own, over a pipe: deadlines cost nothing.
func inTime(t *testing.T, test func(t *testing.T, c *Client, guest net.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		host, guest := net.Pipe()
		c := NewClient(host)
		test(t, c, guest)
		check.Must(t, errors.Join(c.Close(), guest.Close()))
		<-c.Done()
	})
}

// TestAGuestThatHangs: each call but those that wait for the workload ends at its deadline.
func TestAGuestThatHangs(t *testing.T) {
	inTime(t, func(t *testing.T, c *Client, guest net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, guest) }() // it reads, and says nothing
		for method, one := range map[string]question{
			"Shutdown": shutdown, "AddVolume": addVolume, "GetVolumeStats": stats, "ResizeVolume": resize,
			"WriteInput": write, "Ping": ping,
		} {
			began := time.Now()
			err := one(t.Context(), c)
			check.That(t, errors.Is(err, context.DeadlineExceeded) && time.Since(began) == deadlines[method],
				"%s ended after %v with %v", method, time.Since(began), err)
		}
		began := time.Now()
		err := read(check.Within(t, 24*time.Hour), c)
		check.That(t, errors.Is(err, context.DeadlineExceeded) && time.Since(began) == 24*time.Hour,
			"a quiet workload: %v after %v", err, time.Since(began))
	})
}

// TestAGuestGivesUpFirst: it undoes what the host does not wait for.
func TestAGuestGivesUpFirst(t *testing.T) {
	inTime(t, func(t *testing.T, c *Client, guest net.Conn) {
		go func() { _ = addVolume(t.Context(), c) }()
		header := make([]byte, headerSize)
		check.Value(io.ReadFull(guest, header))(t)
		body := make([]byte, binary.BigEndian.Uint32(header))
		check.Value(io.ReadFull(guest, body))(t)
		var req ttrpc.Request
		check.Must(t, proto.Unmarshal(body, &req))
		check.Equal(t, time.Duration(req.GetTimeoutNano()), deadlines["AddVolume"]*9/10, "the guest's time")
	})
}

// TestAGuestThatDrips a byte now and then gains no time by it.
func TestAGuestThatDrips(t *testing.T) {
	answer := frame(1, typeResponse, response(t, &GetVolumeStatsResponse{Message: strings.Repeat("x", 500)}))
	inTime(t, func(t *testing.T, c *Client, guest net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, guest) }()
		dripped := make(chan struct{})
		go func() {
			defer close(dripped)
			for _, one := range answer {
				time.Sleep(time.Second)
				if _, err := guest.Write([]byte{one}); err != nil {
					return
				}
			}
		}()
		began := time.Now()
		err := stats(t.Context(), c)
		took := time.Since(began)
		check.That(t, errors.Is(err, context.DeadlineExceeded) && took == deadlines["GetVolumeStats"], "it ended after %v with %v", took, err)
		// Whoever pings learns that this guest is of no use any more.
		check.Is(t, ping(t.Context(), c), context.DeadlineExceeded) // or it answers a ping
		_ = guest.Close()
		<-dripped
	})
}

// TestALateAnswer is dropped, and the next question answered: a guest may be slow.
func TestALateAnswer(t *testing.T) {
	good := response(t, &PingResponse{Protocol: Protocol})
	inTime(t, func(t *testing.T, c *Client, guest net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, guest) }()
		check.Is(t, ping(t.Context(), c), context.DeadlineExceeded) // or it has answered
		time.AfterFunc(time.Second, func() {
			_, _ = guest.Write(append(frame(1, typeResponse, good), frame(3, typeResponse, good)...))
		})
		check.Must(t, ping(t.Context(), c))
	})
}

// TestAGuestThatDoesNotRead: a question that cannot be written ends the connection.
func TestAGuestThatDoesNotRead(t *testing.T) {
	inTime(t, func(t *testing.T, c *Client, _ net.Conn) {
		began := time.Now()
		check.Fails(t, read(t.Context(), c)) // or it has answered
		<-c.Done()
		took := time.Since(began)
		check.That(t, took <= writeTimeout, "it took %v", took)
	})
}

// TestEveryCallIsBoundedOrBlocks: a method that is new in the wire needs a decision.
func TestEveryCallIsBoundedOrBlocks(t *testing.T) {
	blocking := []string{"WaitProcess", "ReadOutput"}
	services := File_wire_proto.Services()
	for i := range services.Len() {
		if services.Get(i).Name() == "Supervisor" {
			continue // no guest answers
		}
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			name := string(methods.Get(j).Name())
			_, bounded := deadlines[name]
			check.That(t, bounded != slices.Contains(blocking, name), "%s has no deadline, or has one and blocks", name)
			// Whatever an answer says has to be checked.
			says := methods.Get(j).Output().Fields().Len() > 0
			check.That(t, !says || checks[name] != nil, "the answers to %s are not checked", name)
			check.That(t, !methods.Get(j).IsStreamingServer() && !methods.Get(j).IsStreamingClient(), "%s streams", name)
		}
	}
}
