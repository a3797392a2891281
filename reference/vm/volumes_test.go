package vm

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/qemu"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const deviceSize = 1 << 30

// played is a machine and its guest, whose calls fail as the test says.
type played struct {
	wire.VolumesService
	calls []string
	fails map[string]error
	grows func()
}

func (p *played) call(name string) error {
	p.calls = append(p.calls, name)
	return p.fails[name]
}

func (p *played) Plug(_ context.Context, serial string, _ *os.File, _ bool) (*qemu.Disk, error) {
	return &qemu.Disk{Serial: serial}, p.call("plug")
}
func (p *played) Unplug(context.Context, *qemu.Disk) error { return p.call("unplug") }
func (p *played) Resize(_ context.Context, _ *qemu.Disk, accept func(int64) error) (int64, error) {
	if err := accept(deviceSize); err != nil {
		return 0, err
	}
	return deviceSize, p.call("resize")
}

func (p *played) ResizeVolume(context.Context, *wire.ResizeVolumeRequest) (*wire.Empty, error) {
	p.grows()
	return nil, p.call("grow")
}

func (p *played) AddVolume(context.Context, *wire.AddVolumeRequest) (*wire.AddVolumeResponse, error) {
	return new(wire.AddVolumeResponse), p.call("add")
}

func (p *played) RemoveVolume(context.Context, *wire.RemoveVolumeRequest) (*wire.Empty, error) {
	return nil, p.call("remove")
}

func (p *played) FreezeVolume(context.Context, *wire.FreezeVolumeRequest) (*wire.Empty, error) {
	return nil, p.call("freeze")
}

const target = "/target"

// attach attaches the volume, and wants these calls for it.
func (p *played) attach(t *testing.T, v *volumes, fails map[string]error, want ...string) error {
	t.Helper()
	p.calls, p.fails = nil, fails
	err := v.attach(t.Context(), abi.DirName(target), abi.Info{}, func() (*os.File, error) { return nil, p.call("open") })
	check.That(t, slices.Equal(p.calls, want), "calls: %q, want %q", p.calls, want)
	return err
}

func playedVolumes() (*played, *volumes) {
	p := new(played)
	return p, &volumes{machine: p, guest: &wire.Client{VolumesService: p}, byName: make(map[string]*attachedVolume)}
}

// TestMountThatFails leaves nothing in the way of the next attempt, also if the guest mounts the
// volume after the host has given up.
func TestMountThatFails(t *testing.T) {
	p, v := playedVolumes()
	bad, late := errors.New("bad superblock"), context.DeadlineExceeded
	check.Is(t, p.attach(t, v, map[string]error{"add": bad, "remove": status.Error(codes.NotFound, "volume")}, "open", "plug", "add", "remove", "unplug"), bad)
	check.Is(t, p.attach(t, v, map[string]error{"add": late, "remove": late}, "open", "plug", "add", "remove"), late)
	check.Is(t, check.Err(v.get(abi.DirName(target))), handler.ErrNoSandbox)
	check.Is(t, p.attach(t, v, map[string]error{"unplug": late}, "remove", "unplug"), late)
	check.Must(t, p.attach(t, v, nil, "remove", "unplug", "open", "plug", "add"))
	check.Must(t, p.attach(t, v, nil))
}

// TestVolumeThatWasReplaced is not the one that the machine has, and is refused.
func TestVolumeThatWasReplaced(t *testing.T) {
	for replaced, info := range map[bool]abi.Info{
		false: {Device: "/dev/sda", FSType: "ext4", Options: []string{"noatime"}, Metadata: map[string]string{"crust.device": "8:0", "fsGroup": "7"}},
		true:  {Device: "/dev/sda", FSType: "ext4", Metadata: map[string]string{"crust.device": "8:1"}},
	} {
		_, v := playedVolumes()
		first := abi.Info{Device: "/dev/sda", FSType: "ext4", Metadata: map[string]string{"crust.device": "8:0"}}
		open := func() (*os.File, error) { return nil, nil }
		check.Must(t, v.attach(t.Context(), abi.DirName(target), first, open))
		err := v.attach(t.Context(), abi.DirName(target), info, open)
		check.That(t, (err != nil) == replaced && (err == nil || strings.Contains(err.Error(), "delete the pod")), "replaced %v: %v", replaced, err)
	}
}

// TestVolumeThatIsNotBound is unplugged again, unless a container has it.
func TestVolumeThatIsNotBound(t *testing.T) {
	p, v := playedVolumes()
	check.Must(t, p.attach(t, v, nil, "open", "plug", "add"))
	p.fails = map[string]error{"remove": status.Error(codes.FailedPrecondition, "it is in use")}
	v.detachUnused(t.Context(), abi.DirName(target))
	check.Must(t, p.attach(t, v, nil))
	v.detachUnused(t.Context(), abi.DirName(target))
	check.Must(t, p.attach(t, v, nil, "open", "plug", "add"))
	p.fails = map[string]error{"unplug": context.DeadlineExceeded} // it is not mounted any more, and its disk still there
	v.detachUnused(t.Context(), abi.DirName(target))
	check.Must(t, p.attach(t, v, nil, "remove", "unplug", "open", "plug", "add"))
}

// TestSizeThatIsRefused changes nothing, neither in the machine nor in its guest. While the guest grows a filesystem, which
// may take long, other disks are plugged and unplugged.
func TestSizeThatIsRefused(t *testing.T) {
	p, v := playedVolumes()
	check.Must(t, p.attach(t, v, nil, "open", "plug", "add"))
	p.calls = nil
	check.Is(t, check.Err(v.Resize(target, deviceSize+1, 0)), fsops.ErrOutOfRange)
	check.Is(t, check.Err(v.Resize(target, 0, deviceSize-1)), fsops.ErrOutOfRange)
	check.That(t, len(p.calls) == 0, "calls: %q", p.calls)
	p.grows = func() {
		check.Must(t, v.detachAll(t.Context()))
	}
	size, err := v.Resize(target, deviceSize, deviceSize)
	check.That(t, err == nil && size == deviceSize && slices.Equal(p.calls, []string{"resize", "remove", "unplug", "grow"}), "%d, %v, calls: %q", size, err, p.calls)
}

// TestFreezeThatFails: the volume counts as frozen only if it may be.
func TestFreezeThatFails(t *testing.T) {
	p, v := playedVolumes()
	check.Must(t, p.attach(t, v, nil, "open", "plug", "add"))
	for _, c := range []struct {
		err    error
		frozen bool
	}{{status.Error(codes.Unimplemented, "never"), false}, {context.DeadlineExceeded, true}, {status.Error(codes.FailedPrecondition, "it is frozen"), true}} {
		p.fails = map[string]error{"freeze": c.err}
		check.Fails(t, v.Freeze(target, time.Minute))
		check.Equal(t, v.frozen(), c.frozen, "frozen after %v", c.err)
	}
}
