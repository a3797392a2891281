package top

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// fakeAdmin is a daemon on a real socket that can be taken away.
type fakeAdmin struct {
	adminv1.UnimplementedAdminServer
	t      *testing.T
	socket string
	stop   func() // what start has begun

	mu       sync.Mutex
	volumes  []*adminv1.Volume
	pages    int // volumes a page; 0 is all
	watchers map[chan *adminv1.WatchVolumesResponse]bool
	watched  *adminv1.WatchVolumesRequest
	// takes is how long a sandbox needs, asked who was, most how many at once.
	takes        time.Duration
	asked        []string
	flying, most int
	end          chan struct{} // ends all watches when it is closed
}

func newFake(t *testing.T, volumes []*adminv1.Volume) *fakeAdmin {
	t.Helper()
	dir := check.ShortDir(t)
	f := &fakeAdmin{t: t, socket: filepath.Join(dir, "s"), volumes: volumes, end: make(chan struct{}),
		watchers: make(map[chan *adminv1.WatchVolumesResponse]bool)}
	f.start()
	return f
}

func (f *fakeAdmin) start() {
	f.t.Helper()
	server := grpc.NewServer()
	adminv1.RegisterAdminServer(server, f)
	f.stop = rpctest.Serve(f.t, f.socket, server)
}

func (f *fakeAdmin) daemon() Daemon {
	f.t.Helper()
	conn := rpctest.Dial(f.t, f.socket,
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second, Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.6, MaxDelay: 50 * time.Millisecond}}))
	return Daemon{AdminClient: adminv1.NewAdminClient(conn), Timeout: 10 * time.Second,
		Explain: func(err error) string { return "explained: " + status.Code(err).String() }}
}

// put changes a volume and tells the watchers.
func (f *fakeAdmin) put(v *adminv1.Volume) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.volumes = append(f.volumes, v)
	for watcher := range f.watchers {
		watcher <- changed(v)[0]
	}
}

func (f *fakeAdmin) GetNode(context.Context, *adminv1.GetNodeRequest) (*adminv1.GetNodeResponse, error) {
	return looked().Node, nil
}

func (f *fakeAdmin) ListHandlers(context.Context, *adminv1.ListHandlersRequest) (*adminv1.ListHandlersResponse, error) {
	return &adminv1.ListHandlersResponse{Handlers: looked().Handlers}, nil
}

func (f *fakeAdmin) ListDrivers(context.Context, *adminv1.ListDriversRequest) (*adminv1.ListDriversResponse, error) {
	return looked().Drivers, nil
}

func (f *fakeAdmin) ListVolumes(_ context.Context, req *adminv1.ListVolumesRequest) (*adminv1.ListVolumesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var rest []*adminv1.Volume
	for _, v := range f.volumes {
		if v.GetId() > req.GetPageToken() {
			rest = append(rest, v)
		}
	}
	page := &adminv1.ListVolumesResponse{Volumes: rest}
	if f.pages > 0 && len(rest) > f.pages {
		page.Volumes, page.NextPageToken = rest[:f.pages], rest[f.pages-1].GetId()
	}
	return page, nil
}

func (f *fakeAdmin) GetVolumeStats(ctx context.Context, req *adminv1.GetVolumeStatsRequest) (*adminv1.GetVolumeStatsResponse, error) {
	f.mu.Lock()
	f.asked = append(f.asked, req.GetVolume())
	f.flying++
	f.most = max(f.most, f.flying)
	takes := f.takes
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.flying--
		f.mu.Unlock()
	}()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if req.GetVolume() == id(4) {
		return nil, status.Error(codes.DataLoss, "the guest said \x1b[2J")
	}
	return &adminv1.GetVolumeStatsResponse{Usage: usage(3<<30, 4<<30), Took: durationpb.New(7 * time.Millisecond)}, nil
}

func (f *fakeAdmin) WatchVolumes(req *adminv1.WatchVolumesRequest, stream grpc.ServerStreamingServer[adminv1.WatchVolumesResponse]) error {
	changes := make(chan *adminv1.WatchVolumesResponse, 4096)
	f.mu.Lock()
	f.watched = req
	events := append(changed(f.volumes...), syncedEvent)
	f.watchers[changes] = true
	end := f.end
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.watchers, changes)
		f.mu.Unlock()
	}()
	for _, event := range events {
		if err := stream.Send(event); err != nil {
			return err
		}
	}
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case <-end:
			return status.Error(codes.Unavailable, "crust-proxy is shutting down")
		case event := <-changes:
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}
