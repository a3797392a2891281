package driver

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"

	"go.uber.org/zap/zaptest"
)

// admin is crust-proxy, with one volume a page.
type admin struct {
	adminv1.UnimplementedAdminServer

	volumes           []*adminv1.Volume
	freezing, thawing error
	// left is the volume that a driver has left frozen, and until when.
	left  string
	until time.Time
	// dirty is the volume that is written to the disk for a while when it is first frozen.
	dirty string

	mu    sync.Mutex
	calls []string
}

func (a *admin) ListVolumes(_ context.Context, req *adminv1.ListVolumesRequest) (*adminv1.ListVolumesResponse, error) {
	at := slices.IndexFunc(a.volumes, func(v *adminv1.Volume) bool { return v.GetId() == req.GetPageToken() }) + 1
	reply := &adminv1.ListVolumesResponse{Volumes: a.volumes[at : at+1]}
	if at+1 < len(a.volumes) {
		reply.NextPageToken = a.volumes[at].GetId()
	}
	return reply, nil
}

func (a *admin) called(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, what)
}

func (a *admin) syncs(volume string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	dirty := volume == a.dirty
	if dirty {
		a.dirty = ""
	}
	return dirty
}

func (a *admin) FreezeVolume(_ context.Context, req *adminv1.FreezeVolumeRequest) (*adminv1.FreezeVolumeResponse, error) {
	if a.syncs(req.GetVolume()) {
		time.Sleep(300 * time.Millisecond)
	}
	a.called("freeze " + req.GetVolume() + " " + req.GetTimeout().AsDuration().String())
	if req.GetVolume() == a.left && time.Now().Before(a.until) {
		return nil, status.Error(codes.FailedPrecondition, "frozen already")
	}
	return &adminv1.FreezeVolumeResponse{}, a.freezing
}

func (a *admin) ThawVolume(_ context.Context, req *adminv1.ThawVolumeRequest) (*adminv1.ThawVolumeResponse, error) {
	a.called("thaw " + req.GetVolume())
	return &adminv1.ThawVolumeResponse{}, a.thawing
}

func (a *admin) serve(t *testing.T) (socket string) {
	t.Helper()
	socket = t.TempDir() + "/a"
	listener, err := net.Listen("unix", socket)
	check.Must(t, err)
	server := grpc.NewServer()
	adminv1.RegisterAdminServer(server, a)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		check.Must(t, <-done)
	})
	return socket
}

// TestHoldInSandbox has a sandbox that can freeze, cannot, or not for long enough.
func TestHoldInSandbox(t *testing.T) {
	for name, c := range map[string]struct {
		volume            string
		freezing, thawing error
		calls             []string
		held              bool
	}{
		"all the time":  {"v", nil, nil, []string{"freeze 2 2s", "take", "thaw 2"}, true},
		"never":         {"v", status.Error(codes.Unimplemented, "Kata"), nil, []string{"freeze 2 2s", "take"}, false},
		"too short":     {"v", nil, status.Error(codes.FailedPrecondition, "not frozen"), []string{"freeze 2 2s", "take", "thaw 2"}, false},
		"unknown to it": {"w", nil, nil, []string{"take"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			a := &admin{
				volumes: []*adminv1.Volume{
					{Id: "0", VolumeId: "other"}, {Id: "1", VolumeId: "v", ReadOnly: true}, {Id: "2", VolumeId: "v"},
				},
				freezing: c.freezing, thawing: c.thawing,
			}
			f := &freezer{log: zaptest.NewLogger(t), limit: 2 * time.Second, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
			failed := errors.New("take failed")
			free, err := f.hold(t.Context(), []inUse{{c.volume, "/dev/none"}}, func() error { a.called("take"); return failed })
			if held := len(free) == 0; held != c.held || !errors.Is(err, failed) || !slices.Equal(a.calls, c.calls) {
				t.Errorf("free %v after %v: %v", free, a.calls, err)
			}
		})
	}
}

// TestHoldWaitsForAnEarlierFreeze: a driver that was killed has left one of two volumes frozen.
// Its end is waited for once, while nothing is held, and both are frozen together then.
func TestHoldWaitsForAnEarlierFreeze(t *testing.T) {
	for name, c := range map[string]struct {
		left time.Duration
		held bool
	}{"by a driver": {1300 * time.Millisecond, true}, "by somebody, for long": {time.Hour, false}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := &admin{volumes: []*adminv1.Volume{{Id: "1", VolumeId: "v"}, {Id: "2", VolumeId: "w"}}, left: "2", until: time.Now().Add(c.left)}
			f := &freezer{log: zaptest.NewLogger(t), limit: time.Second, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
			free, err := f.hold(t.Context(), []inUse{{"v", "/dev/none"}, {"w", "/dev/none"}}, func() error { a.called("take"); return nil })
			if err != nil || (len(free) == 0) != c.held {
				t.Errorf("free %q: %v", free, err)
			}
			at := slices.Index(a.calls, "take")
			if before := a.calls[:at]; !slices.Equal(slices.Sorted(slices.Values(before)), []string{
				"freeze 1 1s", "freeze 1 1s", "freeze 1 1s", "freeze 2 1s", "freeze 2 1s", "freeze 2 1s", "thaw 1", "thaw 1",
			}) || !slices.Contains(a.calls[at:], "thaw 1") || slices.Contains(a.calls, "thaw 2") == !c.held {
				t.Errorf("%q", a.calls)
			}
		})
	}
}

// TestHoldSyncsFirst: a clean volume does not wait, frozen, until another one has been written
// to the disk.
func TestHoldSyncsFirst(t *testing.T) {
	a := &admin{volumes: []*adminv1.Volume{{Id: "1", VolumeId: "clean"}, {Id: "2", VolumeId: "busy"}}, dirty: "2"}
	f := &freezer{log: zaptest.NewLogger(t), limit: time.Second, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
	free, err := f.hold(t.Context(), []inUse{{"clean", "/dev/none"}, {"busy", "/dev/none"}}, func() error { a.called("take"); return nil })
	if len(free) > 0 || err != nil {
		t.Errorf("free %q: %v", free, err)
	}
	synced := slices.Index(a.calls, "freeze 2 1s")
	if before := a.calls[:synced]; !slices.Equal(before, []string{"freeze 1 1s", "thaw 1"}) {
		t.Errorf("%q", a.calls)
	}
}

// TestHoldWithoutCrustProxy takes what it can get.
func TestHoldWithoutCrustProxy(t *testing.T) {
	for _, socket := range []string{"", t.TempDir() + "/nobody"} {
		f := &freezer{log: zaptest.NewLogger(t), limit: time.Second, sandboxes: sandboxes{socket: socket}}
		taken := false
		free, err := f.hold(t.Context(), []inUse{{"v", "/dev/none"}}, func() error { taken = true; return nil })
		if len(free) != 1 || err != nil || !taken {
			t.Errorf("%q: free %v, taken %v, %v", socket, free, taken, err)
		}
	}
}
