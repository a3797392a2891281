package top

import (
	"path"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// row is a volume as it is shown. It never changes, so that a paused screen can keep
// it. Its texts are escaped: they come from other programs and from guests.
type row struct {
	v *adminv1.Volume

	name, pod, state, driver, handler, sandbox, err string
	size                                            string
	bytes, inodes                                   *adminv1.VolumeUsage // nil is unknown
	took                                            time.Duration
	asked, failed                                   bool
	created                                         time.Time
	words                                           string // what a filter searches, in lower case
	history                                         history
}

// part is the part in use, between 0 and 1.
func part(u *adminv1.VolumeUsage) float64 {
	if u.GetTotal() <= 0 {
		return 0
	}
	return min(1, max(0, float64(u.GetUsed())/float64(u.GetTotal())))
}

func (r *row) id() string { return r.v.GetId() }

// hasSandbox reports whether there is a sandbox that can be asked for usage.
func (r *row) hasSandbox() bool { return r.v.GetSandbox().GetId() != "" }

const podDigits = 8

func newRow(v *adminv1.Volume, escape func(string) string) *row {
	r := &row{
		v: v, name: escape(nameOf(v)), pod: escape(podOf(v)), state: show.StateName(v.GetState()),
		driver: escape(v.GetDriver()), handler: escape(v.GetHandler()),
		sandbox: escape(show.ShortID(v.GetSandbox().GetId())), err: escape(errorOf(v)),
		bytes: show.Usage(v, adminv1.VolumeUsage_UNIT_BYTES), inodes: show.Usage(v, adminv1.VolumeUsage_UNIT_INODES),
		took: v.GetStatsTook().AsDuration(), asked: v.GetStatsAt() != nil,
		failed: statsFailed(v), created: timeOf(v.GetCreatedAt()),
	}
	if r.bytes != nil {
		r.size = sizes(r.bytes)
	}
	r.words = strings.ToLower(strings.Join([]string{
		r.name, r.pod, r.state, r.driver, r.handler, r.err, escape(v.GetSandbox().GetId()), v.GetId(),
		escape(v.GetTargetPath()), escape(v.GetDevice()), escape(v.GetVolumeId()), escape(v.GetPodUid()),
	}, "\n"))
	return r
}

// sizes shows used and total, with one unit if it is the same.
func sizes(u *adminv1.VolumeUsage) string {
	used, total := show.Size(u.GetUsed()), show.Size(u.GetTotal())
	if unit := strings.TrimLeft(total, "0123456789."); strings.TrimLeft(used, "0123456789.") == unit {
		used = strings.TrimSuffix(used, unit)
	}
	return used + "/" + total
}

// statsFailed reports whether the error is that of the last request for stats: both then have
// the same time.
func statsFailed(v *adminv1.Volume) bool {
	return v.GetLastError() != "" && v.GetStatsFailures() > 0 && timeOf(v.GetLastErrorAt()).Equal(timeOf(v.GetStatsAt()))
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

// nameOf is the PersistentVolume's name if kubelet made the target path, which is
// .../volumes/kubernetes.io~csi/NAME/mount, and else the last part of the path. A volume
// that was refused while staging has the driver's volume ID: its path says nothing.
func nameOf(v *adminv1.Volume) string {
	dir, last := path.Split(path.Clean(v.GetTargetPath()))
	switch {
	case last == "mount":
		return path.Base(dir)
	case last == "globalmount" && v.GetVolumeId() != "":
		return v.GetVolumeId()
	}
	return last
}

func podOf(v *adminv1.Volume) string {
	if v.GetPodName() != "" {
		return v.GetPodNamespace() + "/" + v.GetPodName()
	}
	return v.GetPodUid()[:min(len(v.GetPodUid()), podDigits)]
}

// errorOf is what is wrong with the volume, without the volume's name.
func errorOf(v *adminv1.Volume) string {
	if v.GetLastError() != "" {
		return strings.TrimPrefix(v.GetLastError(), "volume "+v.GetTargetPath()+": ")
	}
	if c := v.GetCondition(); c.GetAbnormal() {
		return "abnormal: " + c.GetMessage()
	}
	return ""
}
