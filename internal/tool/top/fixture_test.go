package top

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func TestMain(m *testing.M) {
	time.Local = time.UTC // pictures show the time of the day
	goleak.VerifyTestMain(m)
}

var now = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

func id(n int) string { return fmt.Sprintf("%02x", n) + strings.Repeat("c3", 31) }

func usage(used, total int64) []*adminv1.VolumeUsage {
	return []*adminv1.VolumeUsage{
		{Unit: adminv1.VolumeUsage_UNIT_BYTES, Total: total, Used: used, Available: total - used},
		{Unit: adminv1.VolumeUsage_UNIT_INODES, Total: 1310720, Used: 11, Available: 1310709},
	}
}

func sandbox(name string) *adminv1.Sandbox {
	return &adminv1.Sandbox{Id: name + strings.Repeat("7e", 24), Runtime: "kata-go", BoundAt: before(4 * time.Hour)}
}

const kubelet = "/var/lib/kubelet/pods/"

// volumes are one of each kind, with hostile texts in some.
func volumes() []*adminv1.Volume {
	return []*adminv1.Volume{
		{Id: id(1), TargetPath: kubelet + "0f0e0d0c-1111/volumes/kubernetes.io~csi/pvc-postgres-0/mount",
			State: adminv1.VolumeState_VOLUME_STATE_BOUND, Driver: "ebs.csi.aws.com", Handler: "kata", Device: "/dev/nvme1n1",
			DeviceId: "block 259:1", FsType: "ext4", MountFlags: []string{"noatime", "nodiratime"}, SupplementalGroup: "2000",
			SupplementalGroupChangePolicy: "OnRootMismatch", VolumeId: "vol-0a1b", AccessMode: "SINGLE_NODE_WRITER", Rule: `rule "disks"`,
			Way: "block", PodUid: "0f0e0d0c-1111", PodNamespace: "shop", PodName: "postgres-0", CreatedAt: before(5 * time.Hour),
			Sandbox: sandbox("5a1c"), Usage: usage(17<<30, 20<<30), UsageAt: before(3 * time.Second), StatsAt: before(3 * time.Second),
			StatsTook: durationpb.New(1234 * time.Microsecond), StatsRequests: 120, StatsFailures: 2, Condition: &adminv1.VolumeCondition{Message: "OK"}},
		{Id: id(2), TargetPath: kubelet + "1a2b3c4d-2222/volumes/kubernetes.io~csi/pvc-cache/mount",
			State: adminv1.VolumeState_VOLUME_STATE_PUBLISHED, Driver: "topolvm.io", Handler: "crust", Device: "/dev/vg/b",
			DeviceId: "block 253:2", FsType: "xfs", ReadOnly: true, PodUid: "1a2b3c4d-2222", CreatedAt: before(3 * time.Second)},
		{Id: id(3), TargetPath: kubelet + "evil\x1b[2J/volumes/kubernetes.io~csi/pvc-\u202egnp.exe\x1b]0;owned\a/mount",
			State: adminv1.VolumeState_VOLUME_STATE_DEGRADED, Driver: "topolvm.io", Handler: "kata", Device: "/dev/vg/c", FsType: "ext4",
			PodUid: "evil\x1b[2J", CreatedAt: before(400 * 24 * time.Hour), Condition: &adminv1.VolumeCondition{Abnormal: true, Message: "e\u0301vil\r\n\u009b31m"},
			LastError: "the device \x1b[31m/dev/vg/c\x1b[0m has gone\nEVENT fake row", LastErrorAt: before(time.Minute)},
		{Id: id(4), TargetPath: kubelet + "2b3c4d5e-4444/volumes/kubernetes.io~csi/pvc-logs-容量/mount",
			State: adminv1.VolumeState_VOLUME_STATE_BOUND, Driver: "ebs.csi.aws.com", Handler: "kata", Device: "/dev/nvme2n1", FsType: "xfs",
			PodUid: "2b3c4d5e-4444", PodNamespace: "shop", PodName: "logs-collector-7d9f8b6c5-x2x4z", CreatedAt: before(50 * time.Hour),
			Sandbox: sandbox("77aa"), Usage: usage(98<<30, 100<<30), UsageAt: before(2 * time.Minute), StatsAt: before(10 * time.Second),
			StatsTook: durationpb.New(10 * time.Second), StatsRequests: 9, StatsFailures: 3,
			LastError: "volume " + kubelet + "2b3c4d5e-4444/volumes/kubernetes.io~csi/pvc-logs-容量/mount: the sandbox did not answer in time", LastErrorAt: before(10 * time.Second)},
		{Id: id(5), TargetPath: "/var/lib/kubelet/plugins/kubernetes.io/csi/ebs.csi.aws.com/4f5e/globalmount",
			State: adminv1.VolumeState_VOLUME_STATE_REFUSED, Driver: "ebs.csi.aws.com", Handler: "kata", VolumeId: "vol-99ff", PodNamespace: "shop",
			PodName: "web-1", RefusedBy: "policy", Rule: `rule "only-databases"`, Refusals: 4, CreatedAt: before(90 * time.Second),
			LastError: `the pod asks for deferral, and rule "only-databases" says no`, LastErrorAt: before(5 * time.Second)},
		{Id: id(6), TargetPath: "/run/other/disk", State: adminv1.VolumeState_VOLUME_STATE_ADOPTED, Handler: "kata", Device: "/dev/sdz",
			Sandbox: sandbox("0b0b"), Usage: usage(1, 8<<30), UsageAt: before(time.Second)},
	}
}

func changed(volumes ...*adminv1.Volume) []*adminv1.WatchVolumesResponse {
	var changes []*adminv1.WatchVolumesResponse
	for _, v := range volumes {
		changes = append(changes, &adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_CHANGED, Volume: v})
	}
	return changes
}

func removed(id string) *adminv1.WatchVolumesResponse {
	return &adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_REMOVED, Volume: &adminv1.Volume{Id: id}}
}

var syncedEvent = &adminv1.WatchVolumesResponse{Type: adminv1.WatchVolumesResponse_TYPE_SYNCED}

func looked() Polled {
	return Polled{
		At: now,
		Node: &adminv1.GetNodeResponse{Version: "v1.2.3", StartedAt: before(26 * time.Hour),
			Config: "cluster: {nodeName: node-7}\nrelay: {concurrency: 16}\n"},
		Handlers: []*adminv1.Handler{{Name: "kata", Healthy: true}, {Name: "crust", Problem: "no runtime-cli\x1b[2J is allowed"}},
		Drivers: &adminv1.ListDriversResponse{FrontEnabled: true, Drivers: []*adminv1.Driver{
			{Name: "ebs.csi.aws.com", Ready: true}, {Name: "topolvm.io", Ready: true}}},
	}
}

// plainSettings are for pictures that people read.
func plainSettings() Settings { return Settings{Interval: DefaultInterval, Plain: true, Host: "host"} }

// full is a state with all of volumes(), as it is a moment after the start.
func full(settings Settings, width, height int) *State {
	s := New(settings, now)
	s.Apply(Size{Width: width, Height: height})
	s.Apply(Watched{Changes: append(changed(volumes()...), syncedEvent)})
	s.Apply(looked())
	return s
}

func press(s *State, names ...string) (effects []Effect) {
	for _, name := range names {
		text := show.Either(name == "space", " ", show.When(len([]rune(name)) == 1, name))
		effects = s.Apply(Key{Name: name, Text: text})
	}
	return effects
}

// asked are the volumes that effects want asked.
func asked(effects []Effect) (ids []string) {
	for _, effect := range effects {
		if a, ok := effect.(FetchStats); ok {
			ids = append(ids, a.ID)
		}
	}
	return ids
}

// tidyVolumes are a node as one would wish it, nearly.
func tidyVolumes() []*adminv1.Volume {
	all := volumes()
	postgres, logs, refused := all[0], all[3], all[4]
	cache := proto.CloneOf(postgres)
	cache.Id, cache.TargetPath, cache.PodName = id(7), kubelet+"u/volumes/kubernetes.io~csi/pvc-redis-cache/mount", "redis-2"
	cache.Usage, cache.StatsTook, cache.Device = usage(3<<30, 8<<30), durationpb.New(870*time.Microsecond), "/dev/nvme3n1"
	cache.CreatedAt = before(20 * time.Minute)
	fresh := all[1]
	fresh.PodNamespace, fresh.PodName = "shop", "postgres-1"
	fresh.TargetPath = kubelet + "u/volumes/kubernetes.io~csi/pvc-postgres-1/mount"
	logs.TargetPath = kubelet + "u/volumes/kubernetes.io~csi/pvc-logs/mount"
	logs.PodName = "logs-x2x4z"
	logs.LastError = "Kata sandbox 77aa did not answer in time; it may be overloaded or hung"
	return []*adminv1.Volume{postgres, logs, refused, cache, fresh}
}

// happened reports events of the volume whose details are shown, and of another one.
func happened(s *State) {
	told := []*adminv1.VolumeEvent{
		{LastAt: before(time.Second), Count: 3, What: "unpublish failed", Failed: true, By: "kubelet", Text: "its device is open in\x1b[2J qemu"},
		{LastAt: before(time.Hour), Count: 1, What: "published", By: "kubelet", Text: "for kata"},
	}
	s.Apply(Polled{At: now, Events: told, EventsOf: s.detail.id})
	s.Apply(Polled{At: now, Events: told[:1], EventsOf: "another"})
}
