package cli

import (
	"strings"
	"testing"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// refusedVolume is one whose pod waits. What it repeats was written by others.
func refusedVolume() *adminv1.Volume {
	return &adminv1.Volume{
		Id: strings.Repeat("dd", 32), TargetPath: "/var/lib/kubelet/pods/d/mount", State: adminv1.VolumeState_VOLUME_STATE_REFUSED,
		Driver: "lvm", Handler: "kata", FsType: "xfs", VolumeId: "vol-d", AccessMode: "SINGLE_NODE_WRITER", Rule: `rule "who asks"`,
		PodUid: "0d0d", PodNamespace: "team", PodName: "db-0", RefusedBy: "handler", Refusals: 7,
		CreatedAt: before(3 * time.Minute), LastErrorAt: before(30 * time.Second),
		LastError: "volume /var/lib/kubelet/pods/d/mount of pod team/db-0: a container mounts its sub-directory \"logs\x1b[2J\" by subPath",
	}
}

func TestRefusedVolumesAreShown(t *testing.T) {
	b := newBench(t)
	b.admin.volumes = append(b.admin.volumes, refusedVolume())
	b.serve()
	golden(t, "get-refused.txt", b.run("get", "/var/lib/kubelet/pods/d/mount").out)
	golden(t, "list-refused.txt", b.run("list", "--state", "refused").out)
	golden(t, "list-refused-wide.txt", b.run("list", "--state", "refused", "-o", "wide").out)
	if all := b.run("get"); all.out != b.run("list").out || !strings.Contains(all.out, "REFUSED (handler)") {
		t.Errorf("get without a volume shows %s %s", all.out, all.err)
	}
	if got := b.run("get", "dddddd", "-o", "json").out; !strings.Contains(got, `"refusedBy": "handler"`) || !strings.Contains(got, `"podName": "db-0"`) {
		t.Errorf("JSON: %s", got)
	}
	if got := b.run("doctor", "--quiet").out; !strings.Contains(got, "refused by the handler: volume /var/lib/kubelet/pods/d/mount of pod team/db-0") {
		t.Errorf("doctor does not tell of it: %s", got)
	}
	b = newBench(t)
	b.admin.volumes[0] = refusedVolume()
	b.serve()
	if got := b.run("watch", "--timeout", "300ms").out; !strings.Contains(got, "REFUSED (handler)") || strings.Contains(got, "\x1b") {
		t.Errorf("watch: %q", got)
	}
}
