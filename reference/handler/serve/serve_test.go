package serve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// other answers with a unit that this version does not know, and without a condition.
type other struct{ handler.Volumes }

func (other) Stats(string) (abi.StatsReply, string, error) {
	return abi.StatsReply{Usage: []abi.Usage{{Unit: "TREES"}, {Unit: abi.UnitBytes}, {Unit: abi.UnitInodes}}}, "sb", nil
}

func TestStatsOfOthers(t *testing.T) {
	reply := check.Value((&server{volumes: other{}}).GetVolumeStats(t.Context(), nil))(t)
	units := sys.Map(reply.GetUsage(), func(u *runtimev1.VolumeUsage) string { return u.GetUnit().String() })
	check.That(t, slices.Equal(units, []string{"UNKNOWN", "BYTES", "INODES"}) && reply.GetVolumeCondition() == nil, "it answers %v", reply)
}

// slow are volumes whose freeze takes longer than its caller waits.
type slow struct {
	handler.Volumes
	giveUp func()
	asked  []string
}

func (v *slow) Freeze(target string, _ time.Duration) error {
	v.asked = append(v.asked, "freeze "+target)
	v.giveUp()
	return nil
}

func (v *slow) Thaw(target string) error {
	v.asked = append(v.asked, "thaw "+target)
	return nil
}

func TestNobodyIsLeftToThaw(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	v := &slow{giveUp: func() {}}
	s, req := &server{volumes: v}, &handlerv1.FreezeVolumeRequest{TargetPath: "/target", Timeout: durationpb.New(time.Minute)}
	_, err := s.FreezeVolume(ctx, req)
	check.That(t, err == nil && slices.Equal(v.asked, []string{"freeze /target"}), "while the caller waits: %q, %v", v.asked, err)
	v.asked, v.giveUp = nil, cancel
	_, err = s.FreezeVolume(ctx, req)
	check.That(t, errors.Is(err, context.Canceled) && slices.Equal(v.asked, []string{"freeze /target", "thaw /target"}),
		"after the caller has gone: %q, %v", v.asked, err)
}

// TestCallsThatHangAreBounded: they keep neither other volumes waiting nor a thaw, and as
// soon as they end there is room again.
func TestCallsThatHangAreBounded(t *testing.T) {
	underWay := calls{count: make(map[string]int)}
	hang, ended := make(chan struct{}), make(chan error)
	ask := func(method, target string, next grpc.UnaryHandler) error {
		_, err := underWay.answer(t.Context(), &handlerv1.ThawVolumeRequest{TargetPath: target}, &grpc.UnaryServerInfo{FullMethod: method}, next)
		return err
	}
	begun := make(chan struct{})
	for range maxCalls {
		go func() {
			ended <- ask(handlerv1.Handler_GetVolumeStats_FullMethodName, "/hangs", func(context.Context, any) (any, error) {
				begun <- struct{}{}
				<-hang
				return nil, nil
			})
		}()
		<-begun
	}
	done := func(context.Context, any) (any, error) { return nil, nil }
	check.Code(t, ask(handlerv1.Handler_ResizeVolume_FullMethodName, "/hangs", done), codes.DeadlineExceeded) // one call more
	check.NoError(t, ask(handlerv1.Handler_ResizeVolume_FullMethodName, "/other", done), "another volume")
	check.Must(t, ask(handlerv1.Handler_ThawVolume_FullMethodName, "/hangs", done)) // a thaw
	close(hang)
	for range maxCalls {
		check.Must(t, <-ended)
	}
	err := ask(handlerv1.Handler_GetVolumeStats_FullMethodName, "/hangs", done)
	check.That(t, err == nil && len(underWay.count) == 0, "after they have ended: %v; under way: %v", err, underWay.count)
}

// hanging are volumes of which all but /healthy hang until they are told to end.
type hanging struct {
	handler.Volumes
	end   chan struct{}
	begun atomic.Int32 // calls that hang
}

func (v *hanging) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	if target != "/healthy" {
		v.begun.Add(1)
		<-v.end
	}
	return abi.StatsReply{Condition: &abi.Condition{}}, "", nil
}

func (v *hanging) Thaw(string) error { return nil }

// TestStorageOutageLeavesHealthyVolumes: the one connection of crust-proxy is read on while most volumes hang, and
// are asked again and again.
func TestStorageOutageLeavesHealthyVolumes(t *testing.T) {
	listener, volumes := bufconn.Listen(1<<20), &hanging{end: make(chan struct{})}
	server := New(volumes)
	go server.Serve(listener) //nolint:errcheck // it ends with the test
	defer server.Stop()       // which waits for the calls
	defer close(volumes.end)
	conn, err := grpc.NewClient("passthrough:///", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	check.Must(t, err)
	defer conn.Close() //nolint:errcheck // the test is over
	client := handlerv1.NewHandlerClient(conn)
	for rounds := 0; rounds < 2*maxCalls || volumes.begun.Load() < manyCalls && rounds < 100; rounds++ {
		var all sync.WaitGroup
		for i := range manyCalls / 4 {
			all.Go(func() {
				_, err := client.GetVolumeStats(check.Within(t, 200*time.Millisecond), &handlerv1.GetVolumeStatsRequest{TargetPath: fmt.Sprintf("/hangs-%d", i)})
				check.That(t, err != nil, "a volume that hangs answered")
			})
		}
		all.Wait()
	}
	check.Require(t, volumes.begun.Load() >= manyCalls, "only %d calls hang", volumes.begun.Load())
	ctx := check.Within(t, 20*time.Second)
	check.NoError(t, check.Err(client.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: "/healthy"})), "stats of a healthy volume")
	check.NoError(t, check.Err(client.ThawVolume(ctx, &handlerv1.ThawVolumeRequest{TargetPath: "/hangs-1"})), "a thaw")
}
