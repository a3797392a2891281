package adminapi

import (
	"context"
	"slices"
	"strings"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// ListDrivers shows the CSI drivers.
func (s *AdminServer) ListDrivers(context.Context, *adminv1.ListDriversRequest) (*adminv1.ListDriversResponse, error) {
	if s.Drivers == nil {
		return &adminv1.ListDriversResponse{}, nil
	}
	volumes := make(map[string]int64)
	for _, status := range s.Node.All() {
		volumes[status.Driver]++
	}
	out := &adminv1.ListDriversResponse{FrontEnabled: true, Drivers: s.Drivers()}
	for _, d := range out.GetDrivers() {
		d.Volumes = volumes[d.GetName()]
	}
	slices.SortFunc(out.Drivers, func(x, y *adminv1.Driver) int { return strings.Compare(x.GetName(), y.GetName()) })
	return out, nil
}
