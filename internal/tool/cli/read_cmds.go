package cli

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/internal/tool/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func listCmd(d *daemon, view *volumeView, watch bool) *cobra.Command {
	var which selection
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the volumes, by pod",
		Long: `List the volumes, by pod. Each filter takes several values: --state held,refused or
--state held --state refused. With --watch every change is shown too, until
interrupted or until --timeout, where it is given; -o json prints one object per line.`,
		Example: "  crustctl list --namespace shop --state degraded -o wide",
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch err := show.CheckStates(which.states...); {
			case err != nil:
				return command.WrongUsage(cmd, err)
			case watch:
				return d.follow(cmd, &which, view)
			}
			return list(cmd.Context(), d, view, &which)
		},
	}
	if watch {
		cmd.Use, cmd.Aliases, cmd.Short, cmd.Long = "watch", nil, "Short for list --watch", ""
		cmd.Example = "  crustctl watch --handler kata -o json"
	} else {
		cmd.Flags().BoolVarP(&watch, "watch", "w", false, "then show every change")
	}
	which.addFlags(cmd, d)
	return cmd
}

func (d *daemon) volumes(ctx context.Context) (volumes []*adminv1.Volume, err error) {
	err = d.call(ctx, func(ctx context.Context, c *client) error {
		volumes, err = top.ListVolumes(ctx, c, &adminv1.ListVolumesRequest{})
		return err
	})
	return volumes, err
}

func list(ctx context.Context, d *daemon, view *volumeView, which *selection) error {
	volumes, err := d.volumes(ctx)
	if err != nil {
		return err
	}
	volumes = slices.DeleteFunc(volumes, func(v *adminv1.Volume) bool { return !which.matches(v) })
	slices.SortStableFunc(volumes, func(a, b *adminv1.Volume) int {
		return cmp.Or(strings.Compare(show.Pod(a), show.Pod(b)), strings.Compare(show.VolumeName(a), show.VolumeName(b)))
	})
	object := map[string][]printer.Object{"volumes": printer.Objects(volumes)}
	return view.out.Result(object, func() error { return view.list(volumes) })
}

func getCmd(d *daemon, view *volumeView) *cobra.Command {
	return &cobra.Command{
		Use: "get [VOLUME]", Short: "Show all that is known of one volume; without one, list them",
		Example: "  crustctl get shop/postgres-0",
		Args:    command.Arguments("[VOLUME]"), ValidArgsFunction: completeVolume(d),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return list(cmd.Context(), d, view, &selection{})
			}
			v, err := d.find(cmd, args[0])
			if err != nil {
				return err
			}
			return view.out.Result(v, func() error { return view.describe(v) })
		},
	}
}

func statsCmd(d *daemon, view *volumeView) *cobra.Command {
	return volumeCmd(d, &cobra.Command{
		Use: "stats VOLUME", Short: "Ask the sandbox of a volume for fresh numbers",
		Example: "  crustctl stats shop/postgres-0",
	}, func(cmd *cobra.Command, v *adminv1.Volume) error {
		return run(cmd, d, view.out, adminv1.AdminClient.GetVolumeStats, &adminv1.GetVolumeStatsRequest{Volume: v.GetId()},
			func(got *adminv1.GetVolumeStatsResponse) error { return view.stats(v, got) })
	})
}

func handlersCmd(d *daemon, out *printer.Printer) *cobra.Command {
	return &cobra.Command{
		Use: "handlers", Short: "Show the runtime handlers and whether they can work",
		Example: "  crustctl handlers",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd, d, out, adminv1.AdminClient.ListHandlers, &adminv1.ListHandlersRequest{}, func(got *adminv1.ListHandlersResponse) error {
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
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd, d, view.out, adminv1.AdminClient.ListDrivers, &adminv1.ListDriversRequest{}, view.drivers)
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
	text, t := printer.Text, printer.NewTable("NAME", "VERSION", "MODE", "READY", "VOLUMES", "SINCE", "+KUBELET", "+CAPABILITIES", "+ENDPOINT", "+SOCKET", "PROBLEM")
	for _, d := range got.GetDrivers() {
		t.Add(text(d.GetName()), text(d.GetVersion()), text(d.GetMode()), printer.YesNo(d.GetReady()), text(number(d.GetVolumes())), text(w.age(d.GetSince())),
			text(d.GetKubeletStatus()), text(strings.Join(d.GetCapabilities(), ",")), text(d.GetEndpoint()), text(d.GetCsiSocket()),
			printer.Painted(show.Red, show.Joined("; ", show.When(d.GetDirectlyRegistered(), "registered with kubelet directly too: see crustctl doctor"), d.GetProblem())))
	}
	return w.out.Table(t)
}

// versions are those of both sides; the daemon's is empty where it was not asked.
type versions struct {
	Client string `json:"client"`
	Daemon string `json:"daemon,omitempty"`
	// Proof is how the daemon proves that nobody has a device open.
	Proof       string `json:"proof,omitempty"`
	ProofReason string `json:"proofReason,omitempty"`
	// ConfigBadSince and ConfigAcceptedAt are as in GetNodeResponse.
	ConfigBadSince   string `json:"configBadSince,omitempty"`
	ConfigAcceptedAt string `json:"configAcceptedAt,omitempty"`
	HTTPProblem      string `json:"httpProblem,omitempty"`
}

func versionCmd(d *daemon, out *printer.Printer) *cobra.Command {
	var clientOnly bool
	cmd := &cobra.Command{
		Use: "version", Short: "Show the versions of crustctl and of the daemon",
		Example: "  crustctl version --client",
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{Client: sys.Version()}
			if clientOnly {
				return v.print(out)
			}
			node, err := ask(cmd.Context(), d, adminv1.AdminClient.GetNode, &adminv1.GetNodeRequest{})
			v.Daemon, v.Proof, v.ProofReason = node.GetVersion(), node.GetProof(), node.GetProofReason()
			v.ConfigBadSince, v.ConfigAcceptedAt = stamp(node.GetConfigBadSince()), stamp(node.GetConfigAcceptedAt())
			v.HTTPProblem = node.GetHttpProblem()
			return cmp.Or(v.print(out), err)
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "do not ask the daemon")
	return cmd
}

func (v versions) print(out *printer.Printer) error {
	text := "crustctl     " + v.Client
	for _, known := range []struct{ heading, what string }{
		{"\ncrust-proxy  ", v.Daemon}, {"\nfree devices are proven by: ", v.Proof}, {", because ", v.ProofReason},
		{"\nthe configuration file (see crustctl doctor) is bad since ", v.ConfigBadSince},
		{"\nin force is the configuration that was accepted at ", v.ConfigAcceptedAt}, {"\n", v.HTTPProblem},
	} {
		if known.what != "" {
			text += known.heading + show.Escape(known.what)
		}
	}
	return out.Result(v, func() error { return out.Line(text) })
}

// stamp is empty for a time that is not set.
func stamp(at *timestamppb.Timestamp) string {
	return show.When(at != nil, at.AsTime().Format(time.RFC3339))
}

func (d *daemon) follow(cmd *cobra.Command, which *selection, view *volumeView) error {
	write := view.watchTable()
	if view.out.Machine() {
		write = func(event *adminv1.WatchVolumesResponse) error { return view.out.Document(event) }
	}
	ctx, cancel := context.WithCancel(cmd.Context())
	defer cancel()
	if cmd.Flags().Changed("timeout") { // as a deadline it would end the watch with an error of the daemon's
		defer time.AfterFunc(d.timeout, cancel).Stop()
	}
	return d.within(forEver).call(ctx, func(ctx context.Context, c *client) error { return c.watch(ctx, which.watched(write)) })
}

// watched leaves out the volumes that are not selected, but for the change by which one no longer is.
// It adds the names of a volume that has gone.
func (s *selection) watched(write func(*adminv1.WatchVolumesResponse) error) func(*adminv1.WatchVolumesResponse) error {
	shown := make(map[string]*adminv1.Volume)
	return func(event *adminv1.WatchVolumesResponse) error {
		v := event.GetVolume()
		old, was := shown[v.GetId()]
		delete(shown, v.GetId())
		switch {
		case event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED:
		case event.GetType() == adminv1.WatchVolumesResponse_TYPE_REMOVED && was:
			v.PodNamespace, v.PodName, v.PodUid, v.PvcName = old.GetPodNamespace(), old.GetPodName(), old.GetPodUid(), old.GetPvcName()
		case s.matches(v):
			shown[v.GetId()] = v
		case !was:
			return nil
		}
		return write(event)
	}
}

func (c *client) watch(ctx context.Context, write func(*adminv1.WatchVolumesResponse) error) error {
	stream, err := c.WatchVolumes(ctx, &adminv1.WatchVolumesRequest{})
	for err == nil {
		var event *adminv1.WatchVolumesResponse
		if event, err = stream.Recv(); err == nil {
			if err := write(event); err != nil {
				return err
			}
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil // an interrupt and the end of --timeout are no errors
	case errors.Is(err, io.EOF):
		return command.Explain(errors.New("the daemon ended the watch"), "It may be restarting: see '"+c.daemon.service().Status()+"'.")
	}
	return err
}

// watchTable collects the rows of the first listing, so that the columns fit them, and
// then prints each change as it comes.
func (w *volumeView) watchTable() func(*adminv1.WatchVolumesResponse) error {
	t := printer.NewTable(append([]string{"EVENT"}, volumeColumns...)...)
	// room for later changes: event, pod, volume, state, used, size, age
	t.Widths = []int{7, 20, 20, 9, 8, 8, 5}
	synced := false
	return func(event *adminv1.WatchVolumesResponse) error {
		if event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			synced = true
			return w.out.Table(t)
		}
		name := show.Either(!synced, "LISTED", strings.TrimPrefix(event.GetType().String(), "TYPE_"))
		t.Add(append([]printer.Cell{printer.Text(name)}, w.row(event.GetVolume())...)...)
		if !synced {
			return nil
		}
		return w.out.Table(t)
	}
}

type volumeView struct {
	out *printer.Printer
	now func() time.Time
}

func (w *volumeView) age(at *timestamppb.Timestamp) string {
	return show.Either(at != nil, show.Duration(w.now().Sub(at.AsTime())), printer.Nothing)
}

var volumeColumns = []string{
	"POD", "VOLUME", "STATE", "USED", "SIZE", "AGE", "DEVICE", "ID",
	"+DRIVER", "+HANDLER", "+SANDBOX", "+IDENTITY", "+FS", "+ACCESS", "+USAGE AGE", "+LAST ERROR", "+TARGET",
}

func (w *volumeView) row(v *adminv1.Volume) []printer.Cell {
	text := printer.Text
	used, total := "", "" // a table cannot show how old they are
	if u := show.Usage(v, adminv1.VolumeUsage_UNIT_BYTES); u != nil && !isStale(v) {
		used, total = show.Size(u.GetUsed()), show.Size(u.GetTotal())
	}
	return []printer.Cell{
		text(show.ShortPod(v)), text(show.VolumeName(v)), stateCell(v), text(used), text(total), text(w.age(v.GetCreatedAt())),
		text(v.GetDevice()), text(show.ShortID(v.GetId())),
		text(v.GetDriver()), text(v.GetHandler()), text(show.ShortID(v.GetSandbox().GetId())), text(v.GetDeviceId()),
		text(v.GetFsType()), text(access(v)), text(w.age(v.GetUsageAt())), printer.Painted(show.Red, v.GetLastError()), text(v.GetTargetPath()),
	}
}

func (w *volumeView) list(volumes []*adminv1.Volume) error {
	if len(volumes) == 0 {
		return w.out.Line("No volumes.")
	}
	t := printer.NewTable(volumeColumns...)
	for _, v := range volumes {
		t.Add(w.row(v)...)
	}
	return w.out.Table(t)
}

func (w *volumeView) describe(v *adminv1.Volume) error {
	refused := v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED
	t := &printer.Table{}
	t.Pair("Pod:", show.WithDetail(show.Pod(v), show.When(v.GetPodName() != "", v.GetPodUid())))
	t.Pair("Claim:", v.GetPvcName())
	t.Pair("Volume:", kubelet.VolumeName(v.GetTargetPath()))
	t.Pair("ID:", v.GetId())
	t.Pair("Target:", v.GetTargetPath())
	t.Add(printer.Text("State:"), stateCell(v))
	t.Pair("Age:", w.age(v.GetCreatedAt()))
	t.Pair("Driver:", v.GetDriver())
	t.Pair("CSI volume:", v.GetVolumeId())
	t.Pair("Way:", show.WithDetail(v.GetWay(), ways[v.GetWay()]))
	t.Pair(show.Either(refused, "Decided by:", "Deferred by:"), v.GetRule())
	t.Pair("Handler:", v.GetHandler())
	t.Pair("Device:", show.WithDetail(v.GetDevice(), v.GetDeviceId()))
	t.Pair("Filesystem:", v.GetFsType())
	t.Pair("Access:", show.WithDetail(access(v), v.GetAccessMode()))
	t.Pair("Mount flags:", strings.Join(v.GetMountFlags(), ","))
	t.Pair("Group:", show.WithDetail(v.GetSupplementalGroup(), v.GetSupplementalGroupChangePolicy()))
	if v.GetGroupProblem() != "" {
		t.Add(printer.Text(""), printer.Painted(show.Red, v.GetGroupProblem()))
	}
	t.Pair("Sandbox:", w.sandbox(v.GetSandbox()))
	if v.GetHeldBy() != "" {
		t.Add(printer.Text("Held by:"), printer.Painted(show.Red, v.GetHeldBy()+", for "+w.age(v.GetHeldSince())))
	}
	if v.GetFrozenSince() != nil {
		t.Add(printer.Text("Frozen:"), printer.Painted(show.Yellow, "for "+w.age(v.GetFrozenSince())+" so far; crustctl thaw ends that"))
	}
	t.Pair("Snapshots:", v.GetSnapshots())
	how := show.Either(v.GetGrowWaits() != "", "waits: "+v.GetGrowWaits(), "at the next mount")
	t.Pair("Grow to:", show.When(v.GetGrowToBytes() != 0, show.WithDetail(show.Size(v.GetGrowToBytes()), how)))
	t.Add(printer.Text("Condition:"), conditionCell(v.GetCondition()))
	if n := v.GetRefusals(); n > 0 {
		t.Pair("Refused by:", v.GetRefusedBy()+" ("+show.Either(n == 1, "once", number(n)+" times")+")")
	}
	when := show.When(v.GetLastError() != "", " ("+w.age(v.GetLastErrorAt())+" ago)")
	t.Add(printer.Text("Last error:"), printer.Painted(show.Red, v.GetLastError()+when))
	if err := w.out.Table(t); err != nil || refused {
		return err
	}
	if len(v.GetUsage()) == 0 {
		return w.out.Line("Usage:         not known yet; while its pod runs, ask with: crustctl stats " + show.ShortID(v.GetId()))
	}
	since := show.When(isStale(v), ", and not again since")
	return cmp.Or(w.out.Line("\nUsage, learned "+w.age(v.GetUsageAt())+" ago"+since+":"), w.out.Table(usageTable(v.GetUsage())))
}

func (w *volumeView) stats(v *adminv1.Volume, got *adminv1.GetVolumeStatsResponse) error {
	t := &printer.Table{}
	t.Pair("Volume:", strings.TrimPrefix(named(v), "volume "))
	t.Add(printer.Text("Condition:"), conditionCell(got.GetCondition()))
	t.Pair("Sandbox:", w.sandbox(got.GetSandbox()))
	t.Pair("Took:", got.GetTook().AsDuration().Round(10*time.Microsecond).String())
	return cmp.Or(w.out.Table(usageTable(got.GetUsage())), w.out.Table(t))
}

func (w *volumeView) sandbox(s *adminv1.Sandbox) string {
	return show.When(s.GetId() != "", s.GetId()+" ("+s.GetRuntime()+", known for "+w.age(s.GetBoundAt())+")")
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

func stateCell(v *adminv1.Volume) printer.Cell {
	detail := show.When(v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED, v.GetRefusedBy())
	return printer.Painted(show.StateColour(v.GetState()), show.WithDetail(show.StateName(v.GetState()), detail))
}

var ways = map[string]string{"native": "the driver deferred by itself", "block": "the driver was asked for block access"}

// isStale reports whether the sandbox has failed to answer since the usage was learned.
func isStale(v *adminv1.Volume) bool {
	return v.GetStatsAt() != nil && !v.GetStatsAt().AsTime().Equal(v.GetUsageAt().AsTime()) // the clock may have gone back
}

func access(v *adminv1.Volume) string { return show.Either(v.GetReadOnly(), "ro", "rw") }

func usageTable(usage []*adminv1.VolumeUsage) *printer.Table {
	text, t := printer.Text, printer.NewTable("UNIT", "TOTAL", "USED", "AVAILABLE", "USE%")
	for _, u := range usage {
		count, unit := number, "unknown"
		switch u.GetUnit() {
		case adminv1.VolumeUsage_UNIT_BYTES:
			count, unit = show.Size, "bytes"
		case adminv1.VolumeUsage_UNIT_INODES:
			unit = "inodes"
		}
		t.Add(text(unit), text(count(u.GetTotal())), text(count(u.GetUsed())), text(count(u.GetAvailable())), text(show.Percent(u.GetUsed(), u.GetTotal())))
	}
	return t
}

func conditionCell(c *adminv1.VolumeCondition) printer.Cell {
	switch {
	case c == nil:
		return printer.Text("")
	case c.GetAbnormal():
		return printer.Painted(show.Red, "abnormal: "+c.GetMessage())
	}
	return printer.Painted(show.Green, show.WithDetail("normal", c.GetMessage()))
}
