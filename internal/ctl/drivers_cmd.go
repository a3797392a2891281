package ctl

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func (a *app) driversCmd() *cobra.Command {
	return &cobra.Command{
		Use: "drivers", Short: "Show the CSI drivers that registered with the front",
		Example: "  crustctl drivers -o wide",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, c *client) error {
				got, err := c.ListDrivers(ctx, &adminv1.ListDriversRequest{})
				if err != nil {
					return c.explain(err)
				}
				if a.machine() {
					return a.printMessage(got)
				}
				return a.drivers(got)
			})
		},
	}
}

func (a *app) drivers(got *adminv1.ListDriversResponse) error {
	switch {
	case !got.GetFrontEnabled():
		return a.say("The CSI front is off; front.enabled in the daemon's configuration turns it on.")
	case len(got.GetDrivers()) == 0:
		return a.say("No driver has registered with the front.")
	}
	wide := a.output == formatWide
	t := &table{heading: []string{"NAME", "VERSION", "MODE", "READY", "VOLUMES", "SINCE"}}
	if wide {
		t.heading = append(t.heading, "KUBELET", "CAPABILITIES", "ENDPOINT", "SOCKET")
	}
	t.heading = append(t.heading, "PROBLEM")
	for _, d := range got.GetDrivers() {
		t.add(a.driverRow(d, wide)...)
	}
	return a.print(t, true)
}

func (a *app) driverRow(d *adminv1.Driver, wide bool) []cell {
	ready := painted(green, "yes")
	if !d.GetReady() {
		ready = painted(red, "no")
	}
	row := []cell{text(d.GetName()), text(d.GetVersion()), text(d.GetMode()), ready, text(number(d.GetVolumes())), text(a.age(d.GetSince()))}
	if wide {
		row = append(row, text(d.GetKubeletStatus()), text(strings.Join(d.GetCapabilities(), ",")), text(d.GetEndpoint()), text(d.GetCsiSocket()))
	}
	return append(row, driverProblem(d))
}

// driverProblem puts first what is worst: kubelet may call the driver past the
// front.
func driverProblem(d *adminv1.Driver) cell {
	var problems []string
	if d.GetDirectlyRegistered() {
		problems = append(problems, "registered with kubelet directly too: see crustctl doctor")
	}
	if d.GetProblem() != "" {
		problems = append(problems, d.GetProblem())
	}
	return painted(red, strings.Join(problems, "; "))
}

func wayText(way string) string {
	switch way {
	case "native":
		return withDetail(way, "the driver deferred by itself")
	case "block":
		return withDetail(way, "the driver was asked for block access")
	}
	return way
}

func growText(bytes int64) string {
	if bytes == 0 {
		return ""
	}
	return withDetail(size(bytes), "at the next mount")
}
