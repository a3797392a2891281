package admin

import (
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func TestReleaseOfWhatIsNotOurs(t *testing.T) {
	s := serve(t, "a")
	for volume, want := range map[string]codes.Code{
		s.handler.volumes[0].Target: codes.Unimplemented, // another program's
		s.kubelet + "/pods/b/mount": codes.NotFound,
		"x":                         codes.InvalidArgument,
	} {
		_, err := s.admin().ReleaseVolume(t.Context(), &adminv1.ReleaseVolumeRequest{Volume: volume, Force: true})
		if status.Code(err) != want {
			t.Errorf("%s: %v, want %v", volume, err, want)
		}
	}
}
