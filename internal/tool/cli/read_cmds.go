package cli

import (
	"cmp"
	"context"
	"errors"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

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
			if err != nil {
				return err
			}
			return view.out.Result(got.GetVolume(), func() error { return view.describe(got.GetVolume()) })
		},
	}
}

func statsCmd(d *daemon, view *volumeView) *cobra.Command {
	return &cobra.Command{
		Use: "stats VOLUME", Short: "Ask the sandbox of a volume for fresh numbers",
		Example: "  crustctl stats /var/lib/kubelet/pods/UID/volumes/kubernetes.io~csi/pvc-1/mount",
		Args:    command.Arguments("VOLUME"), ValidArgsFunction: completeVolume(d),
		RunE: func(cmd *cobra.Command, args []string) error {
			return run(cmd, d, view.out, adminv1.AdminClient.GetVolumeStats, &adminv1.GetVolumeStatsRequest{Volume: args[0]}, view.stats)
		},
	}
}

func handlersCmd(d *daemon, out *printer.Printer) *cobra.Command {
	return &cobra.Command{
		Use: "handlers", Short: "Show the runtime handlers and whether they can work",
		Example: "  crustctl handlers",
		Args:    command.Arguments(),
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
		Args:    command.Arguments(),
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
		Args:    command.Arguments(),
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
	if at == nil {
		return ""
	}
	return at.AsTime().Format(time.RFC3339)
}

func watchCmd(d *daemon, view *volumeView) *cobra.Command {
	req := &adminv1.WatchVolumesRequest{}
	cmd := &cobra.Command{
		Use: "watch", Short: "Show the volumes, then every change until interrupted",
		Long: `Show the volumes, then every change until interrupted. -o json prints one
object per line. --timeout, where it is given, ends the watch; else it goes on.`,
		Example: "  crustctl watch --handler kata -o json",
		Args:    command.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			write := view.watchTable()
			if view.out.Machine() {
				write = func(event *adminv1.WatchVolumesResponse) error { return view.out.Document(event) }
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			if cmd.Flags().Changed("timeout") { // as a deadline it would end the watch with an error of the daemon's
				defer time.AfterFunc(d.timeout, cancel).Stop()
			}
			return d.within(forEver).call(ctx, func(ctx context.Context, c *client) error { return c.watch(ctx, req, write) })
		},
	}
	selectors(cmd, d, &req.Driver, &req.Handler)
	return cmd
}

func (c *client) watch(ctx context.Context, req *adminv1.WatchVolumesRequest, write func(*adminv1.WatchVolumesResponse) error) error {
	stream, err := c.WatchVolumes(ctx, req)
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
		return watchEnded(c.service)
	}
	return err
}

// watchTable collects the rows of the first listing, so that the columns fit them, and
// then prints each change as it comes.
func (w *volumeView) watchTable() func(*adminv1.WatchVolumesResponse) error {
	t := printer.NewTable(append([]string{"EVENT"}, w.heading()...)...)
	// room for later changes: event, id, state, ..., sandbox, used, size, age
	t.Widths = []int{7, show.ShortIDLength, 9, 0, 0, 0, show.ShortIDLength, 8, 8, 5}
	synced := false
	return func(event *adminv1.WatchVolumesResponse) error {
		if event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			synced = true
			return w.out.Table(t)
		}
		name := strings.TrimPrefix(event.GetType().String(), "TYPE_")
		if !synced {
			name = "LISTED"
		}
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
	if at == nil {
		return printer.Nothing
	}
	return show.Duration(w.now().Sub(at.AsTime()))
}

func (w *volumeView) heading() []string {
	heading := []string{"ID", "STATE", "DRIVER", "HANDLER", "DEVICE", "SANDBOX", "USED", "SIZE", "AGE"}
	if w.out.Wide() {
		heading = append(heading, "IDENTITY", "FS", "ACCESS", "POD", "USAGE AGE", "LAST ERROR")
	}
	return append(heading, "TARGET")
}

func (w *volumeView) row(v *adminv1.Volume) []printer.Cell {
	text := printer.Text
	used, total := usedOf(v)
	row := []printer.Cell{
		text(show.ShortID(v.GetId())), stateCell(v), text(v.GetDriver()), text(v.GetHandler()),
		text(v.GetDevice()), text(cmp.Or(v.GetHeldBy(), show.ShortID(v.GetSandbox().GetId()))), text(used), text(total), text(w.age(v.GetCreatedAt())),
	}
	if w.out.Wide() {
		row = append(row, text(v.GetDeviceId()), text(v.GetFsType()), text(access(v)), text(show.Pod(v)),
			text(w.age(v.GetUsageAt())), printer.Painted(show.Red, v.GetLastError()))
	}
	return append(row, text(v.GetTargetPath()))
}

func (w *volumeView) list(volumes []*adminv1.Volume) error {
	if len(volumes) == 0 {
		return w.out.Line("No volumes.")
	}
	t := printer.NewTable(w.heading()...)
	for _, v := range volumes {
		t.Add(w.row(v)...)
	}
	return w.out.Table(t)
}

func (w *volumeView) describe(v *adminv1.Volume) error {
	refused := v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED
	rule, pod := "Deferred by:", show.Pod(v)
	if refused {
		rule = "Decided by:"
	}
	if v.GetPodName() != "" {
		pod = show.WithDetail(pod, v.GetPodUid())
	}
	t := &printer.Table{}
	t.Pair("Target:", v.GetTargetPath())
	t.Pair("ID:", v.GetId())
	t.Add(printer.Text("State:"), stateCell(v))
	t.Pair("Age:", w.age(v.GetCreatedAt()))
	t.Pair("Driver:", v.GetDriver())
	t.Pair("CSI volume:", v.GetVolumeId())
	t.Pair("Way:", show.WithDetail(v.GetWay(), ways[v.GetWay()]))
	t.Pair(rule, v.GetRule())
	t.Pair("Handler:", v.GetHandler())
	t.Pair("Device:", show.WithDetail(v.GetDevice(), v.GetDeviceId()))
	t.Pair("Filesystem:", v.GetFsType())
	t.Pair("Access:", show.WithDetail(access(v), v.GetAccessMode()))
	t.Pair("Mount flags:", strings.Join(v.GetMountFlags(), ","))
	t.Pair("Group:", show.WithDetail(v.GetSupplementalGroup(), v.GetSupplementalGroupChangePolicy()))
	if v.GetGroupProblem() != "" {
		t.Add(printer.Text(""), printer.Painted(show.Red, v.GetGroupProblem()))
	}
	t.Pair("Pod:", pod)
	t.Pair("Sandbox:", w.sandbox(v.GetSandbox()))
	if v.GetHeldBy() != "" {
		t.Add(printer.Text("Held by:"), printer.Painted(show.Red, v.GetHeldBy()+", for "+w.age(v.GetHeldSince())))
	}
	if v.GetFrozenSince() != nil {
		t.Add(printer.Text("Frozen:"), printer.Painted(show.Yellow, "for "+w.age(v.GetFrozenSince())+"; crustctl thaw ends that"))
	}
	t.Pair("Grow to:", growText(v))
	t.Add(printer.Text("Condition:"), conditionCell(v.GetCondition()))
	switch v.GetRefusals() {
	case 0:
	case 1:
		t.Pair("Refused by:", v.GetRefusedBy()+" (once)")
	default:
		t.Pair("Refused by:", v.GetRefusedBy()+" ("+number(v.GetRefusals())+" times)")
	}
	lastError := v.GetLastError()
	if lastError != "" {
		lastError += " (" + w.age(v.GetLastErrorAt()) + " ago)"
	}
	t.Add(printer.Text("Last error:"), printer.Painted(show.Red, lastError))
	if err := w.out.Table(t); err != nil || refused {
		return err
	}
	return w.describeUsage(v)
}

func (w *volumeView) describeUsage(v *adminv1.Volume) error {
	if len(v.GetUsage()) == 0 {
		return w.out.Line("Usage:         not known yet; ask with: crustctl stats " + show.ShortID(v.GetId()))
	}
	since := ""
	if isStale(v) {
		since = ", and not again since"
	}
	if err := w.out.Line("\nUsage, learned " + w.age(v.GetUsageAt()) + " ago" + since + ":"); err != nil {
		return err
	}
	return w.out.Table(usageTable(v.GetUsage()))
}

func (w *volumeView) stats(got *adminv1.GetVolumeStatsResponse) error {
	if err := w.out.Table(usageTable(got.GetUsage())); err != nil {
		return err
	}
	t := &printer.Table{}
	t.Add(printer.Text("Condition:"), conditionCell(got.GetCondition()))
	t.Pair("Sandbox:", w.sandbox(got.GetSandbox()))
	t.Pair("Took:", got.GetTook().AsDuration().Round(10*time.Microsecond).String())
	return w.out.Table(t)
}

func (w *volumeView) sandbox(s *adminv1.Sandbox) string {
	if s.GetId() == "" {
		return ""
	}
	return s.GetId() + " (" + s.GetRuntime() + ", for " + w.age(s.GetBoundAt()) + ")"
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

func stateCell(v *adminv1.Volume) printer.Cell {
	state := show.StateName(v.GetState())
	if v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED {
		state = show.WithDetail(state, v.GetRefusedBy())
	}
	return printer.Painted(show.StateColour(v.GetState()), state)
}

var ways = map[string]string{"native": "the driver deferred by itself", "block": "the driver was asked for block access"}

func growText(v *adminv1.Volume) string {
	switch {
	case v.GetGrowToBytes() == 0:
		return ""
	case v.GetGrowWaits() != "":
		return show.WithDetail(show.Size(v.GetGrowToBytes()), "waits: "+v.GetGrowWaits())
	}
	return show.WithDetail(show.Size(v.GetGrowToBytes()), "at the next mount")
}

// isStale reports whether the sandbox has failed to answer since the usage was learned.
func isStale(v *adminv1.Volume) bool {
	return v.GetStatsAt().AsTime().After(v.GetUsageAt().AsTime())
}

// usedOf is a volume's usage for a table that cannot show how old it is.
func usedOf(v *adminv1.Volume) (used, total string) {
	u := show.Usage(v, adminv1.VolumeUsage_UNIT_BYTES)
	if u == nil || isStale(v) {
		return "", ""
	}
	return show.Size(u.GetUsed()), show.Size(u.GetTotal())
}

func access(v *adminv1.Volume) string {
	if v.GetReadOnly() {
		return "ro"
	}
	return "rw"
}

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
