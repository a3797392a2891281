//go:build system

package front

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// stacking stands before the reference driver and makes one more bind mount for each publish of a device, as several
// vendors' drivers do. Its unpublish takes away one, and fails, or says OK, while others are left.
type stacking struct {
	t       *testing.T
	saysOK  bool
	mu      sync.Mutex
	request []byte // the last publish
	device  string
	asked   map[string]int
}

// startStacking gives the reference driver's arguments.
func startStacking(t *testing.T, saysOK bool) (*stacking, []string) {
	t.Helper()
	s := &stacking{t: t, saysOK: saysOK, asked: make(map[string]int)}
	return s, startBefore(t, map[string]passthrough.Local{
		csi.Node_NodePublishVolume_FullMethodName:   s.publish,
		csi.Node_NodeUnpublishVolume_FullMethodName: s.unpublish,
	})
}

// startBefore starts a proxy before the reference driver, which answers some calls in
// its place, and gives that driver's arguments.
func startBefore(t *testing.T, local map[string]passthrough.Local) []string {
	t.Helper()
	dir := check.ShortDir(t)
	rig.Before(t, rig.Dial(t, dir+"/real.sock"), dir+"/csi.sock", local)
	return []string{"--endpoint", "unix://" + dir + "/real.sock", "--kubelet-endpoint", dir + "/csi.sock"}
}

func (s *stacking) publish(ctx context.Context, request []byte, forward func(context.Context, []byte) ([]byte, error)) ([]byte, error) {
	reply, err := forward(ctx, request)
	if err != nil {
		return nil, err
	}
	req := &csi.NodePublishVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil || req.GetVolumeCapability().GetBlock() == nil {
		return reply, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked["publish"]++
	s.request, s.device = request, req.GetTargetPath()
	if s.asked["publish"] > 1 { // the first bind mount is the reference driver's own
		return reply, unix.Mount(s.device, s.device, "", unix.MS_BIND, "")
	}
	return reply, nil
}

func (s *stacking) unpublish(ctx context.Context, request []byte, forward func(context.Context, []byte) ([]byte, error)) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked["unpublish"]++
	if s.device == "" || s.layers() < 2 {
		return forward(ctx, request)
	}
	if err := unix.Unmount(s.device, unix.UMOUNT_NOFOLLOW); err != nil {
		return nil, err
	}
	if s.saysOK {
		return proto.Marshal(&csi.NodeUnpublishVolumeResponse{})
	}
	return nil, status.Errorf(codes.Internal, "remove %s: device or resource busy", s.device)
}

// layers counts the mounts at the private path.
func (s *stacking) layers() (count int) {
	for _, point := range rig.MountPoints(s.device) {
		if point == s.device {
			count++
		}
	}
	return count
}

func (s *stacking) times(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[what]
}

// TestDriverThatStacksBindMounts: kubelet repeats a publish after its restarts, and
// the driver is not asked again; what it has stacked by other ways goes in one call.
func TestDriverThatStacksBindMounts(t *testing.T) {
	for name, saysOK := range map[string]bool{"its unpublish fails": false, "its unpublish says OK": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			driver, args := startStacking(t, saysOK)
			n := newNode(t, deferAll, args...)
			v := n.create("pv-1", "ext4", 16*mib)
			check.Must(t, n.stage(v))
			for range 3 {
				check.Must(t, n.publish(v, "pod-1"))
			}
			n.restart()
			check.Must(t, n.publish(v, "pod-1"))
			asked := driver.times("publish")
			check.That(t, asked == 1, "the driver was asked to publish %d times", asked)
			check.Must(t, unix.Unmount(driver.device, 0)) // somebody has taken it away
			check.Must(t, n.publish(v, "pod-1"))
			asked = driver.times("publish")
			check.That(t, asked == 2, "the driver was asked to publish %d times", asked)
			n.wantGuarded(v, "pod-1")
			for range 5 {
				check.Must(t, unix.Mount(driver.device, driver.device, "", unix.MS_BIND, ""))
			}
			check.Must(t, n.unpublish(v, "pod-1"))
			asked = driver.times("unpublish")
			check.That(t, asked >= 6, "the driver was asked to unpublish %d times", asked)
			check.Must(t, n.unstage(v))
			n.remove(v)
		})
	}
}

// TestDriverWithoutRawBlock ignores that it is asked for a device, as Vultr's does. Its mount is undone,
// and it gets no other volume to damage until a restart.
func TestDriverWithoutRawBlock(t *testing.T) {
	t.Parallel()
	n := newNode(t, deferAll, startBefore(t, map[string]passthrough.Local{csi.Node_NodeStageVolume_FullMethodName: asMount})...)
	first, second := n.create("pv-1", "ext4", 16*mib), n.create("pv-2", "ext4", 16*mib)
	for _, c := range []struct {
		v     *volume
		asked bool
	}{{first, true}, {second, false}, {second, true}} {
		if c.v == second && c.asked {
			n.restart()
		}
		err := n.stage(c.v)
		check.Code(t, err, codes.Unimplemented, driverName, "has no raw block volumes", "defer: false")
		asked := strings.Contains(err.Error(), "mounted a filesystem (ext4) at "+n.Kubelet)
		check.That(t, asked == c.asked, "the driver was asked: %t; %v", asked, err)
		mounts := rig.Mounts(n.Kubelet)
		check.That(t, len(mounts)+len(n.loops()) == 0, "still mounted: %+v, of %q", mounts, n.loops())
	}
	n.remove(first)
	n.remove(second)
}

// asMount has a stage be done as one of a filesystem.
func asMount(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
	req := &csi.NodeStageVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, err
	}
	req.GetVolumeCapability().AccessType = rig.MountAccess("ext4").GetAccessType()
	raw, err := proto.Marshal(req)
	if err != nil {
		return nil, err
	}
	return forward(ctx, raw)
}
