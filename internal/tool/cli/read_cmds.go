package cli

import (
	"cmp"
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/internal/tool/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func listCmd(d *daemon, view *volumeView) *cobra.Command {
	var driver, handler, state string
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the volumes",
		Example: "  crustctl list --state degraded -o wide",
		Args:    command.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			wanted, err := parseState(state)
			if err != nil {
				return command.WrongUsage(cmd, err)
			}
			return list(cmd.Context(), d, view, &adminv1.ListVolumesRequest{Driver: driver, Handler: handler, State: wanted})
		},
	}
	selectors(cmd, d, &driver, &handler)
	stateFlag(cmd, &state)
	return cmd
}

func list(ctx context.Context, d *daemon, view *volumeView, req *adminv1.ListVolumesRequest) error {
	var volumes []*adminv1.Volume
	err := d.call(ctx, func(ctx context.Context, c *client) (err error) {
		volumes, err = top.ListVolumes(ctx, c, req)
		return err
	})
	if err != nil {
		return err
	}
	object := map[string][]printer.Object{"volumes": printer.Objects(volumes)}
	return view.out.Result(object, func() error { return view.list(volumes) })
}

func getCmd(d *daemon, view *volumeView) *cobra.Command {
	return &cobra.Command{
		Use: "get [VOLUME]", Short: "Show all that is known of one volume; without one, list them",
		Example: "  crustctl get 3f1c9a0b52de",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return command.Arguments("VOLUME")(cmd, args)
		},
		ValidArgsFunction: completeVolume(d),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return list(cmd.Context(), d, view, &adminv1.ListVolumesRequest{})
			}
			got, err := ask(cmd.Context(), d, adminv1.AdminClient.GetVolume, &adminv1.GetVolumeRequest{Volume: args[0]})
			return printResult(view.out, got.GetVolume(), err, view.describe)
		},
	}
}

func statsCmd(d *daemon, view *volumeView) *cobra.Command {
	return &cobra.Command{
		Use: "stats VOLUME", Short: "Ask the sandbox of a volume for fresh numbers",
		Example: "  crustctl stats /var/lib/kubelet/pods/UID/volumes/kubernetes.io~csi/pvc-1/mount",
		Args:    command.Arguments("VOLUME"), ValidArgsFunction: completeVolume(d),
		RunE: func(cmd *cobra.Command, args []string) error {
			got, err := ask(cmd.Context(), d, adminv1.AdminClient.GetVolumeStats, &adminv1.GetVolumeStatsRequest{Volume: args[0]})
			return printResult(view.out, got, err, view.stats)
		},
	}
}

func handlersCmd(d *daemon, out *printer.Printer) *cobra.Command {
	return &cobra.Command{
		Use: "handlers", Short: "Show the runtime handlers and whether they can work",
		Example: "  crustctl handlers",
		Args:    command.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			got, err := ask(cmd.Context(), d, adminv1.AdminClient.ListHandlers, &adminv1.ListHandlersRequest{})
			return printResult(out, got, err, func(got *adminv1.ListHandlersResponse) error {
				text, t := printer.Text, printer.NewTable("NAME", "HEALTHY", "VOLUMES", "BOUND", "PROBLEM")
				for _, h := range got.GetHandlers() {
					t.Add(text(h.GetName()), printer.YesNo(h.GetHealthy()), text(number(h.GetVolumes())), text(number(h.GetBound())), text(h.GetProblem()))
				}
				return out.Table(t)
			})
		},
	}
}

func driversCmd(d *daemon, view *volumeView) *cobra.Command {
	return &cobra.Command{
		Use: "drivers", Short: "Show the CSI drivers that registered with the front",
		Example: "  crustctl drivers -o wide",
		Args:    command.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			got, err := ask(cmd.Context(), d, adminv1.AdminClient.ListDrivers, &adminv1.ListDriversRequest{})
			return printResult(view.out, got, err, view.drivers)
		},
	}
}

func (w *volumeView) drivers(got *adminv1.ListDriversResponse) error {
	switch {
	case !got.GetFrontEnabled():
		return w.out.Line("The CSI front is off; front.enabled in the daemon's configuration turns it on.")
	case len(got.GetDrivers()) == 0:
		return w.out.Line("No driver has registered with the front.")
	}
	heading := []string{"NAME", "VERSION", "MODE", "READY", "VOLUMES", "SINCE"}
	if w.out.Wide() {
		heading = append(heading, "KUBELET", "CAPABILITIES", "ENDPOINT", "SOCKET")
	}
	text, t := printer.Text, printer.NewTable(append(heading, "PROBLEM")...)
	for _, d := range got.GetDrivers() {
		row := []printer.Cell{text(d.GetName()), text(d.GetVersion()), text(d.GetMode()), printer.YesNo(d.GetReady()), text(number(d.GetVolumes())), text(w.age(d.GetSince()))}
		if w.out.Wide() {
			row = append(row, text(d.GetKubeletStatus()), text(strings.Join(d.GetCapabilities(), ",")), text(d.GetEndpoint()), text(d.GetCsiSocket()))
		}
		t.Add(append(row, printer.Painted(show.Red, driverProblem(d)))...)
	}
	return w.out.Table(t)
}

// driverProblem names the worst first: kubelet may call the driver past the front.
func driverProblem(d *adminv1.Driver) string {
	var problems []string
	if d.GetDirectlyRegistered() {
		problems = append(problems, "registered with kubelet directly too: see crustctl doctor")
	}
	if d.GetProblem() != "" {
		problems = append(problems, d.GetProblem())
	}
	return strings.Join(problems, "; ")
}

// versions are those of both sides; the daemon's is empty where it was not asked.
type versions struct {
	Client string `json:"client"`
	Daemon string `json:"daemon,omitempty"`
	// Proof is how the daemon proves that nobody has a device open.
	Proof       string `json:"proof,omitempty"`
	ProofReason string `json:"proofReason,omitempty"`
}

func versionCmd(d *daemon, out *printer.Printer) *cobra.Command {
	var clientOnly bool
	cmd := &cobra.Command{
		Use: "version", Short: "Show the versions of crustctl and of the daemon",
		Example: "  crustctl version --client",
		Args:    command.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{Client: sys.Version()}
			if clientOnly {
				return v.print(out)
			}
			node, err := ask(cmd.Context(), d, adminv1.AdminClient.GetNode, &adminv1.GetNodeRequest{})
			v.Daemon, v.Proof, v.ProofReason = node.GetVersion(), node.GetProof(), node.GetProofReason()
			return cmp.Or(v.print(out), err)
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "do not ask the daemon")
	return cmd
}

func (v versions) print(out *printer.Printer) error {
	text := "crustctl     " + v.Client
	if v.Daemon != "" {
		text += "\ncrust-proxy  " + show.Escape(v.Daemon)
	}
	if v.Proof != "" {
		text += "\nfree devices are proven by: " + show.Escape(v.Proof)
	}
	if v.ProofReason != "" {
		text += ", because " + show.Escape(v.ProofReason)
	}
	return out.Result(v, func() error { return out.Line(text) })
}
