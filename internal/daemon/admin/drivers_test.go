package admin

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func TestListDrivers(t *testing.T) {
	s := serve(t, "pod-1", "pod-2")
	since := time.Unix(1700000000, 0)
	s.drivers = []*adminv1.Driver{
		{Name: "z", Problem: "its socket is gone", DirectlyRegistered: true},
		{Name: "d", Version: "v2", Endpoint: "/d.sock", CsiSocket: "/run/d.sock", Capabilities: []string{"STAGE_UNSTAGE_VOLUME"},
			Mode: volume.WayBlock, Ready: true, Since: timestamppb.New(since), KubeletStatus: "registered"},
	}
	got, err := s.admin().ListDrivers(t.Context(), &adminv1.ListDriversRequest{})
	if err != nil {
		t.Fatal(err)
	}
	want := &adminv1.ListDriversResponse{FrontEnabled: true, Drivers: []*adminv1.Driver{
		{Name: "d", Version: "v2", Endpoint: "/d.sock", CsiSocket: "/run/d.sock", Capabilities: []string{"STAGE_UNSTAGE_VOLUME"},
			Mode: "block", Ready: true, Since: timestamppb.New(since), KubeletStatus: "registered", Volumes: 2},
		{Name: "z", Problem: "its socket is gone", DirectlyRegistered: true},
	}}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func TestListDriversWithTheFrontOff(t *testing.T) {
	got, err := serve(t).admin().ListDrivers(t.Context(), &adminv1.ListDriversRequest{})
	if err != nil || got.GetFrontEnabled() || len(got.GetDrivers()) != 0 {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestVolumesShowTheirOrigin(t *testing.T) {
	s := serve(t, "pod-1")
	v := s.handler.volumes[0]
	v.Origin = &volume.Origin{VolumeID: "vol-1", Way: volume.WayBlock, Rule: `rule "a"`, AccessMode: "SINGLE_NODE_WRITER",
		Private: filepath.Join(s.kubelet, "plugins")}
	v.GrowTo = 1 << 30
	got, err := s.admin().GetVolume(t.Context(), &adminv1.GetVolumeRequest{Volume: v.Target})
	if err != nil {
		t.Fatal(err)
	}
	shown := got.GetVolume()
	if shown.GetVolumeId() != "vol-1" || shown.GetWay() != "block" || shown.GetRule() != `rule "a"` ||
		shown.GetAccessMode() != "SINGLE_NODE_WRITER" || shown.GetGrowToBytes() != 1<<30 ||
		!strings.Contains(shown.GetGrowWaits(), "until a pod without kata") {
		t.Errorf("got %v", shown)
	}
}
