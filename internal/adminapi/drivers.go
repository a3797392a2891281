package adminapi

import (
	"context"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// DriverState is how a CSI driver stands with the front.
type DriverState struct {
	Name, Version string
	// Endpoint is the driver's CSI socket, CSISocket the front's for it.
	Endpoint, CSISocket string
	// Capabilities are CSI's names of the driver's node capabilities.
	Capabilities []string
	// Mode is volume.WayNative or volume.WayBlock.
	Mode string
	// Ready is set where kubelet can use the driver through the front; Problem
	// says what is missing and what to do.
	Ready   bool
	Problem string
	// Since is when the driver registered.
	Since time.Time
	// KubeletStatus is what kubelet said of the registration.
	KubeletStatus string
	// DirectlyRegistered is set where the driver registered with kubelet too.
	DirectlyRegistered bool
}

// ListDrivers shows the CSI drivers.
func (s *AdminServer) ListDrivers(context.Context, *adminv1.ListDriversRequest) (*adminv1.ListDriversResponse, error) {
	if s.Drivers == nil {
		return &adminv1.ListDriversResponse{}, nil
	}
	volumes := make(map[string]int64)
	for _, status := range s.Node.List() {
		volumes[status.Driver]++
	}
	out := &adminv1.ListDriversResponse{FrontEnabled: true}
	for _, d := range s.Drivers() {
		out.Drivers = append(out.Drivers, &adminv1.Driver{
			Name: d.Name, Version: d.Version, Endpoint: d.Endpoint, CsiSocket: d.CSISocket, Capabilities: d.Capabilities,
			Mode: d.Mode, Ready: d.Ready, Problem: d.Problem, Since: stamp(d.Since), KubeletStatus: d.KubeletStatus,
			DirectlyRegistered: d.DirectlyRegistered, Volumes: volumes[d.Name],
		})
	}
	slices.SortFunc(out.Drivers, func(x, y *adminv1.Driver) int { return strings.Compare(x.GetName(), y.GetName()) })
	return out, nil
}
