package ctl

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func (a *app) listCmd() *cobra.Command {
	var driver, handler, state string
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the volumes",
		Example: "  crustctl list --state degraded -o wide",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			wanted, err := parseState(state)
			if err != nil {
				return wrongUsage(cmd, err)
			}
			req := &adminv1.ListVolumesRequest{Driver: driver, Handler: handler, State: wanted}
			return a.call(cmd, func(ctx context.Context, c *client) error { return a.list(ctx, c, req) })
		},
	}
	a.selectors(cmd, &driver, &handler)
	cmd.Flags().StringVar(&state, "state", "", "only volumes in this state: "+strings.Join(stateNames(), ", "))
	complete(cmd, "state", stateNames()...)
	return cmd
}

// selectors adds the flags that select volumes.
func (a *app) selectors(cmd *cobra.Command, driver, handler *string) {
	cmd.Flags().StringVar(driver, "driver", "", "only volumes of this CSI driver")
	cmd.Flags().StringVar(handler, "handler", "", "only volumes of this runtime handler")
	a.completeLive(cmd, "driver", driversOf)
	a.completeLive(cmd, "handler", handlersOf)
}

func (a *app) list(ctx context.Context, c *client, req *adminv1.ListVolumesRequest) error {
	volumes, err := c.list(ctx, req)
	if err != nil {
		return err
	}
	if a.machine() {
		raw, err := toJSONList("volumes", volumes)
		if err != nil {
			return err
		}
		return a.printRaw(raw)
	}
	if len(volumes) == 0 {
		return a.say("No volumes.")
	}
	t := &table{heading: a.volumeHeading()}
	for _, v := range volumes {
		t.add(a.volumeRow(v)...)
	}
	return a.print(t, true)
}

func (a *app) getCmd() *cobra.Command {
	return &cobra.Command{
		Use: "get [VOLUME]", Short: "Show all that is known of one volume; without one, list them",
		Example: "  crustctl get 3f1c9a0b52de",
		Args:    atMostOne, ValidArgsFunction: a.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return a.call(cmd, func(ctx context.Context, c *client) error { return a.list(ctx, c, &adminv1.ListVolumesRequest{}) })
			}
			return a.call(cmd, func(ctx context.Context, c *client) error {
				got, err := c.GetVolume(ctx, &adminv1.GetVolumeRequest{Volume: args[0]})
				if err != nil {
					return c.explain(err)
				}
				if a.machine() {
					return a.printMessage(got.GetVolume())
				}
				return a.describe(got.GetVolume())
			})
		},
	}
}

func atMostOne(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return arguments("VOLUME")(cmd, args)
	}
	return nil
}

func (a *app) describe(v *adminv1.Volume) error {
	t := &table{heading: []string{"", ""}}
	t.add(text("Target:"), text(v.GetTargetPath()))
	t.add(text("ID:"), text(v.GetId()))
	t.add(text("State:"), stateCell(v))
	t.add(text("Age:"), text(a.age(v.GetCreatedAt())))
	t.add(text("Driver:"), text(v.GetDriver()))
	t.add(text("CSI volume:"), text(v.GetVolumeId()))
	t.add(text("Way:"), text(wayText(v.GetWay())))
	t.add(text(ruleLabel(v)), text(v.GetRule()))
	t.add(text("Handler:"), text(v.GetHandler()))
	t.add(text("Device:"), text(withDetail(v.GetDevice(), v.GetDeviceId())))
	t.add(text("Filesystem:"), text(v.GetFsType()))
	t.add(text("Access:"), text(withDetail(access(v), v.GetAccessMode())))
	t.add(text("Mount flags:"), text(strings.Join(v.GetMountFlags(), ",")))
	t.add(text("Group:"), text(withDetail(v.GetSupplementalGroup(), v.GetSupplementalGroupChangePolicy())))
	t.add(text("Pod:"), text(podDetail(v)))
	t.add(text("Sandbox:"), text(a.sandbox(v.GetSandbox())))
	t.add(text("Grow to:"), text(growText(v.GetGrowToBytes())))
	t.add(text("Condition:"), conditionCell(v.GetCondition()))
	if v.GetRefusals() > 0 {
		t.add(text("Refused by:"), text(refusedText(v)))
	}
	t.add(text("Last error:"), a.lastError(v))
	if err := a.print(t, false); err != nil || v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED {
		return err
	}
	if len(v.GetUsage()) == 0 {
		return a.say("Usage:         not known yet; ask with: crustctl stats " + short(v.GetId()))
	}
	if err := a.say("\nUsage, learned " + a.age(v.GetUsageAt()) + " ago:"); err != nil {
		return err
	}
	return a.print(usageTable(v.GetUsage()), true)
}

// ruleLabel says what the rule did.
func ruleLabel(v *adminv1.Volume) string {
	if v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED {
		return "Decided by:"
	}
	return "Deferred by:"
}

func podDetail(v *adminv1.Volume) string {
	if v.GetPodName() == "" {
		return v.GetPodUid()
	}
	return withDetail(podText(v), v.GetPodUid())
}

// refusedText is who said no, and how often.
func refusedText(v *adminv1.Volume) string {
	if v.GetRefusals() == 1 {
		return v.GetRefusedBy() + " (once)"
	}
	return v.GetRefusedBy() + " (" + number(v.GetRefusals()) + " times)"
}

func (a *app) sandbox(s *adminv1.Sandbox) string {
	if s.GetId() == "" {
		return ""
	}
	return s.GetId() + " (" + s.GetRuntime() + ", for " + a.age(s.GetBoundAt()) + ")"
}

func (a *app) lastError(v *adminv1.Volume) cell {
	if v.GetLastError() == "" {
		return text("")
	}
	return painted(red, v.GetLastError()+" ("+a.age(v.GetLastErrorAt())+" ago)")
}

func (a *app) statsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "stats VOLUME", Short: "Ask the sandbox of a volume for fresh numbers",
		Example: "  crustctl stats /var/lib/kubelet/pods/UID/volumes/kubernetes.io~csi/pvc-1/mount",
		Args:    arguments("VOLUME"), ValidArgsFunction: a.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.call(cmd, func(ctx context.Context, c *client) error {
				got, err := c.GetVolumeStats(ctx, &adminv1.GetVolumeStatsRequest{Volume: args[0]})
				if err != nil {
					return c.explain(err)
				}
				if a.machine() {
					return a.printMessage(got)
				}
				return a.stats(got)
			})
		},
	}
}

func (a *app) stats(got *adminv1.GetVolumeStatsResponse) error {
	if err := a.print(usageTable(got.GetUsage()), true); err != nil {
		return err
	}
	t := &table{heading: []string{"", ""}}
	t.add(text("Condition:"), conditionCell(got.GetCondition()))
	t.add(text("Sandbox:"), text(a.sandbox(got.GetSandbox())))
	t.add(text("Took:"), text(got.GetTook().AsDuration().Round(10*time.Microsecond).String()))
	return a.print(t, false)
}

func (a *app) handlersCmd() *cobra.Command {
	return &cobra.Command{
		Use: "handlers", Short: "Show the runtime handlers and whether they can work",
		Example: "  crustctl handlers",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, c *client) error {
				got, err := c.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
				if err != nil {
					return c.explain(err)
				}
				if a.machine() {
					return a.printMessage(got)
				}
				return a.handlers(got.GetHandlers())
			})
		},
	}
}

func (a *app) handlers(all []*adminv1.Handler) error {
	t := &table{heading: []string{"NAME", "HEALTHY", "VOLUMES", "BOUND", "PROBLEM"}}
	for _, h := range all {
		healthy := painted(green, "yes")
		if !h.GetHealthy() {
			healthy = painted(red, "no")
		}
		t.add(text(h.GetName()), healthy, text(number(h.GetVolumes())), text(number(h.GetBound())), text(h.GetProblem()))
	}
	return a.print(t, true)
}
