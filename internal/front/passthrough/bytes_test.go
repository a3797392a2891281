package passthrough

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// spoiling is a pool whose buffers are overwritten the moment they are given
// back: who still reads one, or sends it, has nonsense.
type spoiling struct{ out atomic.Int64 }

func (s *spoiling) Get(length int) *[]byte {
	s.out.Add(1)
	buffer := make([]byte, length)
	return &buffer
}

func (s *spoiling) Put(buffer *[]byte) {
	s.out.Add(-1)
	for i := range *buffer {
		(*buffer)[i] = 0xEE
	}
}

func randomBytes(random *rand.Rand, length int) []byte {
	out := make([]byte, length)
	for i := range out {
		out[i] = byte(random.Uint32())
	}
	return out
}

// methods are some of each way that a call can go.
func methods() []string {
	var known []string
	for method := range UnaryMethods() {
		known = append(known, method)
	}
	slices.Sort(known)
	return append(known[:12], "/csi.v1.SnapshotMetadata/GetMetadataDelta", "/csi.v9.Later/Method", "/vendor.example/A.B-c", "/x/y", "/x/local")
}

// TestBytes: whatever the bytes and the method, what the driver gets is what was
// sent, and its answer arrives as it was. The buffers are spoiled on return.
func TestBytes(t *testing.T) {
	t.Parallel()
	pool := &spoiling{}
	var _ mem.BufferPool = pool
	r := newRig(t, parts{
		driver: raw(echo),
		local:  map[string]Local{"/x/local": passOn},
		proxy:  []grpc.ServerOption{experimental.BufferPool(pool)},
		dial:   []grpc.DialOption{experimental.WithBufferPool(pool)},
	})
	for _, method := range methods() {
		t.Run(method[1:], func(t *testing.T) {
			t.Parallel()
			ctx := patience(t)
			random := rand.New(rand.NewPCG(1, uint64(len(method)))) //nolint:gosec // repeatable
			for _, limit := range []int{0, 1, 5, 100, 5000, 1023, 1024, 1025, 16 << 10, 200 << 10} {
				request := randomBytes(random, limit)
				check.That(t, bytes.Equal(check.Value(ask(ctx, r.proxied, method, request))(t), request), "%d bytes changed on the way", len(request))
			}
		})
	}
}

// TestSizes: the limits of the ends hold, which are far below the proxy's own.
func TestSizes(t *testing.T) {
	t.Parallel()
	free := newRig(t, parts{driver: raw(echo)})
	tight := newRig(t, parts{driver: append(raw(echo), grpc.MaxRecvMsgSize(4<<20))})
	large := bytes.Repeat([]byte("0123456789abcdef"), 12<<16) // 12 MiB
	for _, method := range []string{csi.Controller_ListVolumes_FullMethodName, "/unknown/Method"} {
		got, err := ask(patience(t), free.proxied, method, large)
		check.That(t, err == nil && bytes.Equal(got, large), "%s: %d bytes came back as %d, %v", method, len(large), len(got), err)
		_, direct := ask(patience(t), tight.direct, method, large)
		_, proxied := ask(patience(t), tight.proxied, method, large)
		check.That(t, direct != nil && proxied != nil && direct.Error() == proxied.Error(),
			"%s: the driver's limit says %v, and through the proxy %v", method, direct, proxied)
	}
}

// TestCompressedAnswerIsBounded: a driver cannot have the daemon's memory by a few
// KiB that are many MiB when they are decompressed.
func TestCompressedAnswerIsBounded(t *testing.T) {
	t.Parallel()
	size := 0
	r := newRig(t, parts{driver: raw(func(_ any, stream grpc.ServerStream) error {
		if err := stream.RecvMsg(new([]byte)); err != nil {
			return err
		}
		if err := grpc.SetSendCompressor(stream.Context(), "gzip"); err != nil {
			return err
		}
		return stream.SendMsg(message(string(make([]byte, size))))
	})})
	for _, method := range []string{csi.Controller_ListVolumes_FullMethodName, "/unknown/Method"} {
		size = maxMessage
		got, err := ask(patience(t), r.proxied, method, []byte("x"))
		check.That(t, err == nil && len(got) == size, "%s: of %d bytes came %d: %v", method, size, len(got), err)
		size = maxMessage + 1
		got, err = ask(patience(t), r.proxied, method, []byte("x"))
		check.That(t, status.Code(err) == codes.ResourceExhausted, "%s: %d bytes came: %v", method, len(got), err)
	}
}

// TestMessageOutlivesTheCall: it stays as it came when gRPC uses its buffers again.
func TestMessageOutlivesTheCall(t *testing.T) {
	t.Parallel()
	pool := &spoiling{}
	buffer := pool.Get(2000)
	copy(*buffer, "as it came")
	data := mem.BufferSlice{mem.NewBuffer(buffer, pool)}
	var got []byte
	check.Must(t, (codec{}).Unmarshal(data, &got))
	data.Free() // as gRPC does when Unmarshal has returned
	left := pool.out.Load()
	check.That(t, left == 0 && bytes.HasPrefix(got, []byte("as it came")), "%d buffers were not given back, and the message is %q", left, got[:10])
}
