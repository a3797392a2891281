package cli

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// ListEvents answers with two events of one volume, the newest first.
func (f *fakeAdmin) ListEvents(ctx context.Context, req *adminv1.ListEventsRequest) (*adminv1.ListEventsResponse, error) {
	f.events = req
	if req.GetVolume() == "gone" {
		return &adminv1.ListEventsResponse{}, f.check(ctx)
	}
	published := &adminv1.VolumeEvent{
		Number: 7, FirstAt: before(time.Minute), LastAt: before(time.Minute), Count: 1, What: "published", By: "kubelet", Text: `for kata, by "disks"`,
		Id: idA, TargetPath: "/var/lib/kubelet/pods/a/mount", Driver: "ebs.csi.aws.com", VolumeId: "vol-0a1b", Handler: "kata",
		PodNamespace: "shop", PodName: "postgres-0",
	}
	kept := &adminv1.VolumeEvent{
		Number: 8, FirstAt: before(30 * time.Second), LastAt: before(time.Second), Count: 3, What: "unpublish failed", Failed: true, By: "kubelet",
		Text: "its device is open in\n\x1b[2Jqemu", Id: idA, TargetPath: published.GetTargetPath(), PodUid: "0f0e",
	}
	return &adminv1.ListEventsResponse{Events: []*adminv1.VolumeEvent{kept, published}}, f.check(ctx)
}

func TestEvents(t *testing.T) {
	for file, args := range map[string]string{
		"events.txt": "events shop/postgres-0", "events-wide.txt": "events -o wide --limit 5", "events.json": "events aa11bb -o json",
	} {
		b := newBench(t).serve()
		got := b.run(strings.Fields(args)...)
		check.Require(t, got.code == command.ExitOK, "%s: exit code %d: %s", args, got.code, got.err)
		golden(t, file, got.out)
		if file == "events-wide.txt" && (b.admin.events.GetLimit() != 5 || b.admin.events.GetVolume() != "") ||
			file == "events.txt" && (b.admin.events.GetLimit() != 100 || b.admin.events.GetVolume() != "shop/postgres-0") {
			t.Errorf("%s: asked for %v", args, b.admin.events)
		}
	}
	b := newBench(t).serve()
	got := b.run("events", "gone")
	check.That(t, got.code == command.ExitOK && strings.Contains(got.out, "No event is known"), "%+v", got)
	got = b.run("events", "--limit", "0")
	check.That(t, got.code == command.ExitUsage, "%+v", got)
}
