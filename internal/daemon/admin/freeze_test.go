package admin

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// freezing is a handler that can hold volumes still.
type freezing struct {
	adopting
	frozen time.Duration
}

func (f *freezing) Freeze(_ context.Context, _ *volume.Volume, timeout time.Duration) error {
	f.frozen = timeout
	return f.err
}

func (f *freezing) Thaw(context.Context, *volume.Volume) error {
	f.frozen = 0
	return f.err
}

func TestFreeze(t *testing.T) {
	s := serve(t, "a")
	target := s.handler.volumes[0].Target
	freeze := func(timeout *durationpb.Duration) error {
		_, err := s.admin().FreezeVolume(t.Context(), &adminv1.FreezeVolumeRequest{Volume: target, Timeout: timeout})
		return err
	}
	thaw := func() error {
		_, err := s.admin().ThawVolume(t.Context(), &adminv1.ThawVolumeRequest{Volume: target})
		return err
	}
	for _, err := range []error{freeze(durationpb.New(time.Second)), thaw()} {
		if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), target) {
			t.Errorf("a handler that cannot: %v", err)
		}
	}
	able := &freezing{adopting: adopting{volumes: s.handler.volumes}}
	s.node.Sandboxes.Handlers[0] = able
	if err := freeze(durationpb.New(time.Minute)); err != nil || able.frozen != time.Minute {
		t.Errorf("%v, frozen for %v", err, able.frozen)
	}
	if err := thaw(); err != nil || able.frozen != 0 {
		t.Errorf("%v, frozen for %v", err, able.frozen)
	}
	for _, wrong := range []*durationpb.Duration{nil, durationpb.New(-time.Second), {Seconds: 1, Nanos: -1}} {
		if err := freeze(wrong); status.Code(err) != codes.InvalidArgument {
			t.Errorf("timeout %v: %v", wrong, err)
		}
	}
	able.err = volume.Errorf(volume.InUse, "volume %s: it is not frozen", target)
	if err := thaw(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("got %v", err)
	}
}
