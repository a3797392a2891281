package serve

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

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
	if _, err := s.FreezeVolume(ctx, req); err != nil || !slices.Equal(v.asked, []string{"freeze /target"}) {
		t.Errorf("while the caller waits: %q, %v", v.asked, err)
	}
	v.asked, v.giveUp = nil, cancel
	if _, err := s.FreezeVolume(ctx, req); !errors.Is(err, context.Canceled) || !slices.Equal(v.asked, []string{"freeze /target", "thaw /target"}) {
		t.Errorf("after the caller has gone: %q, %v", v.asked, err)
	}
}
