package cli

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

type volumeView struct {
	out *printer.Printer
	now func() time.Time
}

// age formats how long ago something was, as kubectl does.
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
	t.Pair("Grow to:", growText(v))
	t.Add(printer.Text("Condition:"), conditionCell(v.GetCondition()))
	if v.GetRefusals() > 0 {
		t.Pair("Refused by:", refusedText(v))
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

func refusedText(v *adminv1.Volume) string {
	if v.GetRefusals() == 1 {
		return v.GetRefusedBy() + " (once)"
	}
	return v.GetRefusedBy() + " (" + number(v.GetRefusals()) + " times)"
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
	text := printer.Text
	t := printer.NewTable("UNIT", "TOTAL", "USED", "AVAILABLE", "USE%")
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
