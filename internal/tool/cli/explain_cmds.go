package cli

import (
	"cmp"
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func explainCmd(d *daemon, out *printer.Printer) *cobra.Command {
	return &cobra.Command{
		Use: "explain POD", Short: "Say of each volume of a pod whether it is deferred, and which rule decides",
		Long: `Say of each volume of a pod of this node, namespace/name, whether it is deferred, on
the host or refused, which rule decides, and why not those before it. Other pods, the
device and its filesystem are not looked at. crust-proxy validate --pod FILE does so
before a pod exists.`,
		Example: "  crustctl explain shop/postgres-0", Args: command.Arguments("POD"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return run(cmd, d, out, adminv1.AdminClient.ExplainPod, &adminv1.ExplainPodRequest{Pod: args[0]}, func(got *adminv1.ExplainPodResponse) (err error) {
				for _, v := range got.GetVolumes() {
					text := show.Escape(v.GetVolume() + ": " + v.GetOutcome())
					for _, because := range v.GetBecause() {
						text += "\n    " + show.Escape(because)
					}
					err = cmp.Or(err, out.Line(text))
				}
				return err
			})
		},
	}
}

func eventsCmd(d *daemon, out *printer.Printer) *cobra.Command {
	req := &adminv1.ListEventsRequest{}
	cmd := &cobra.Command{
		Use: "events [VOLUME]", Short: "Show what happened to a volume, or lately to all volumes",
		Long: `Show what happened to a volume, also to one that has gone, or lately to all volumes
of the node: the newest last.`,
		Example: "  crustctl events shop/postgres-0",
		Args: func(cmd *cobra.Command, args []string) error {
			if req.GetLimit() < 1 {
				return command.WrongUsage(cmd, errors.New("--limit is 1 or more"))
			}
			return command.Arguments("[VOLUME]")(cmd, args)
		},
		ValidArgsFunction: completeVolume(d),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				req.Volume = args[0]
			}
			got, err := ask(cmd.Context(), d, adminv1.AdminClient.ListEvents, req)
			if err != nil {
				return err
			}
			slices.Reverse(got.GetEvents())
			return out.Result(got, func() error { return printEvents(out, got.GetEvents()) })
		},
	}
	cmd.Flags().Int32Var(&req.Limit, "limit", 100, "how many events to show, at most")
	return cmd
}

func printEvents(out *printer.Printer, events []*adminv1.VolumeEvent) error {
	if len(events) == 0 {
		return out.Line("No event is known. Events are forgotten after a week, after a reboot, and if there are too many.")
	}
	text, t := printer.Text, printer.NewTable("TIME", "COUNT", "EVENT", "BY", "POD", "+ID", "+CSI VOLUME", "+DRIVER", "+TARGET", "DETAIL")
	for _, e := range events {
		pod := &adminv1.Volume{PodNamespace: e.GetPodNamespace(), PodName: e.GetPodName(), PodUid: e.GetPodUid()}
		t.Add(text(stamp(e.GetLastAt())), text(number(e.GetCount())), printer.Painted(show.When(e.GetFailed(), show.Red), e.GetWhat()), text(e.GetBy()), text(show.Pod(pod)),
			text(show.ShortID(e.GetId())), text(e.GetVolumeId()), text(e.GetDriver()), text(e.GetTargetPath()), text(e.GetText()))
	}
	return out.Table(t)
}
