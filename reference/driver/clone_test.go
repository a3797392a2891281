package driver

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// sparse makes a file with data between holes, and one at its end.
func sparse(t *testing.T, size int64, at ...int64) *os.File {
	t.Helper()
	file := check.Value(os.Create(filepath.Join(t.TempDir(), "sparse")))(t)
	t.Cleanup(func() { _ = file.Close() })
	check.Must(t, file.Truncate(size))
	for i, offset := range at {
		check.Value(file.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 64<<10), offset))(t)
	}
	return file
}

func blocks(t *testing.T, file *os.File) int64 {
	t.Helper()
	check.Must(t, file.Sync()) // some filesystems allocate only then
	var stat unix.Stat_t
	check.Must(t, unix.Fstat(int(file.Fd()), &stat))
	return stat.Blocks
}

func TestCopyKeepsHoles(t *testing.T) {
	const size = 64<<20 + 4096
	from, to := sparse(t, size, 1<<20, 40<<20), sparse(t, 0)
	copied := check.Value(copySparse(t.Context(), to, from, size))(t)
	check.That(t, copied >= 128<<10 && copied <= 1<<20, "%d bytes were copied", copied)
	check.That(t, blocks(t, to) <= 2*blocks(t, from), "%d blocks instead of %d", blocks(t, to), blocks(t, from))
	want := check.Value(os.ReadFile(from.Name()))(t)
	got, err := os.ReadFile(to.Name())
	check.That(t, err == nil && bytes.Equal(got, want), "another content in %d bytes: %v", len(got), err)
}

// endsSoon is a context that has ended when it is asked for the fourth time.
type endsSoon struct {
	context.Context //nolint:containedctx // it is one
	asked           int
}

func (c *endsSoon) Err() error {
	if c.asked++; c.asked > 3 {
		return context.Canceled
	}
	return nil
}

func TestCopyEndsWithItsCaller(t *testing.T) {
	from, to := sparse(t, 64<<20, 0, 8<<20, 16<<20), sparse(t, 0)
	copied, err := copySparse(&endsSoon{Context: t.Context()}, to, from, 64<<20)
	check.That(t, status.Code(err) == codes.Canceled && copied <= 128<<10, "%d bytes: %v", copied, err)
}

func TestSizeOfClone(t *testing.T) {
	for _, c := range []struct {
		required, limit, want int64
		code                  codes.Code
	}{
		{0, 0, 8 << 20, codes.OK},
		{8 << 20, 8 << 20, 8 << 20, codes.OK},
		{9 << 20, 0, 9 << 20, codes.OK},
		{4 << 20, 0, 0, codes.OutOfRange},
		{0, 4 << 20, 0, codes.OutOfRange},
		{2, 1, 0, codes.InvalidArgument},
	} {
		got, err := sizeOfClone(8<<20, &csi.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit})
		check.That(t, got == c.want && status.Code(err) == c.code, "%d..%d: %d, %v", c.required, c.limit, got, err)
	}
}

// created asks for a volume, with a source unless that is empty.
func created(t *testing.T, controller csi.ControllerClient, name string, from source) (*csi.Volume, error) {
	t.Helper()
	reply, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{mountCapability()}, VolumeContentSource: from.content(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: leastSize},
	})
	return reply.GetVolume(), err
}

// TestCloneThatFailsLeavesNothing: neither a record nor a part of an image.
func TestCloneThatFailsLeavesNothing(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 64 << 10 })
	check.Needs(t, !check.Value(hasReflinks(config.DataDir))(t), "a temporary directory without reflinks: set TMPDIR")
	controller := csi.NewControllerClient(conn)
	original := check.Value(created(t, controller, "original", source{}))(t)
	check.Must(t, os.WriteFile(filepath.Join(config.DataDir, "images", fileName(original.GetVolumeId())+".img"), make([]byte, 1<<20), 0o600))
	check.Code(t, check.Err(created(t, controller, "clone", source{Volume: original.GetVolumeId()})), codes.FailedPrecondition) // more than the limit was copied
	for _, dir := range []string{"volumes", "images"} {
		left, _ := os.ReadDir(filepath.Join(config.DataDir, dir))
		check.That(t, len(left) == 1, "left in %s: %v", dir, left)
	}
}

func TestNoClonesWithoutReflinksAndLimit(t *testing.T) {
	config, conn, _ := start(t, nil)
	check.Needs(t, !check.Value(hasReflinks(config.DataDir))(t), "a temporary directory without reflinks: set TMPDIR")
	controller := csi.NewControllerClient(conn)
	reply := check.Value(controller.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{}))(t)
	for _, one := range reply.GetCapabilities() {
		check.That(t, one.GetRpc().GetType() != csi.ControllerServiceCapability_RPC_CLONE_VOLUME, "CLONE_VOLUME is reported")
	}
	check.Code(t, check.Err(created(t, controller, "clone", source{Volume: "v"})), codes.InvalidArgument)
}

// someFile is as a device that is not mounted: it can be synced, at no cost.
const someFile = "/dev/shm"

// admin is crust-proxy, with one volume a page.
type admin struct {
	adminv1.UnimplementedAdminServer

	volumes           []*adminv1.Volume
	freezing, thawing error
	// left is the volume that a driver has left frozen, and refusals how often a freeze is refused for that.
	left     string
	refusals atomic.Int32
	// dirty is the volume that is written to the disk when it is first frozen, until another one is thawed.
	dirty  string
	thawed chan struct{}
	// freezes, if it is set, is called for each freeze.
	freezes func()

	mu    sync.Mutex
	calls []string
}

func (a *admin) ListVolumes(_ context.Context, req *adminv1.ListVolumesRequest) (*adminv1.ListVolumesResponse, error) {
	at := slices.IndexFunc(a.volumes, func(v *adminv1.Volume) bool { return v.GetId() == req.GetPageToken() }) + 1
	reply := &adminv1.ListVolumesResponse{Volumes: a.volumes[at : at+1]}
	if at+1 < len(a.volumes) {
		reply.NextPageToken = a.volumes[at].GetId()
	}
	return reply, nil
}

func (a *admin) called(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, what)
}

func (a *admin) syncs(volume string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	dirty := volume == a.dirty
	if dirty {
		a.dirty = ""
	}
	return dirty
}

func (a *admin) FreezeVolume(_ context.Context, req *adminv1.FreezeVolumeRequest) (*adminv1.FreezeVolumeResponse, error) {
	if a.syncs(req.GetVolume()) {
		select {
		case <-a.thawed:
		case <-time.After(10 * time.Second):
		}
	}
	if a.freezes != nil {
		a.freezes()
	}
	a.called("freeze " + req.GetVolume() + " " + req.GetTimeout().AsDuration().String())
	if req.GetVolume() == a.left && a.refusals.Add(-1) >= 0 {
		return nil, status.Error(codes.FailedPrecondition, "frozen already")
	}
	return &adminv1.FreezeVolumeResponse{}, a.freezing
}

func (a *admin) ThawVolume(_ context.Context, req *adminv1.ThawVolumeRequest) (*adminv1.ThawVolumeResponse, error) {
	a.called("thaw " + req.GetVolume())
	select {
	case a.thawed <- struct{}{}:
	default:
	}
	return &adminv1.ThawVolumeResponse{}, a.thawing
}

func (a *admin) serve(t *testing.T) (socket string) {
	t.Helper()
	socket = t.TempDir() + "/a"
	server := grpc.NewServer()
	adminv1.RegisterAdminServer(server, a)
	rpctest.Serve(t, socket, server)
	return socket
}

// TestHoldInSandbox has a sandbox that can freeze, cannot, or not for long enough.
func TestHoldInSandbox(t *testing.T) {
	for name, c := range map[string]struct {
		volume            string
		freezing, thawing error
		calls             []string
		held              bool
		state             adminv1.VolumeState
	}{
		"all the time":  {"v", nil, nil, []string{"freeze 2 1m0s", "thaw 2", "freeze 2 1m0s", "take", "thaw 2"}, true, adminv1.VolumeState_VOLUME_STATE_BOUND},
		"never":         {"v", status.Error(codes.Unimplemented, "Kata"), nil, []string{"freeze 2 1m0s", "freeze 2 1m0s", "take"}, false, adminv1.VolumeState_VOLUME_STATE_BOUND},
		"too short":     {"v", nil, status.Error(codes.FailedPrecondition, "not frozen"), []string{"freeze 2 1m0s", "thaw 2", "freeze 2 1m0s", "take", "thaw 2"}, false, adminv1.VolumeState_VOLUME_STATE_PUBLISHED},
		"unknown to it": {"w", nil, nil, []string{"take"}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a := &admin{
				volumes: []*adminv1.Volume{
					{Id: "0", VolumeId: "other"}, {Id: "1", VolumeId: "v", ReadOnly: true},
					{Id: "refused", VolumeId: "v", State: adminv1.VolumeState_VOLUME_STATE_REFUSED},
					{Id: "removing", VolumeId: "v", State: adminv1.VolumeState_VOLUME_STATE_REMOVING},
					{Id: "2", VolumeId: "v", State: c.state}, {Id: "held", VolumeId: "v", State: adminv1.VolumeState_VOLUME_STATE_HELD},
				},
				freezing: c.freezing, thawing: c.thawing,
			}
			f := &freezer{log: zaptest.NewLogger(t), limit: time.Minute, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
			failed := errors.New("take failed")
			free, err := f.hold(t.Context(), []inUse{{c.volume, someFile}}, func() error { a.called("take"); return failed })
			held := len(free) == 0
			check.That(t, held == c.held && errors.Is(err, failed) && slices.Equal(a.calls, c.calls), "free %v after %v: %v", free, a.calls, err)
		})
	}
}

// TestHoldWaitsForAnEarlierFreeze: a driver that was killed has left one of two volumes frozen.
// Its end is waited for once, while nothing is held, and both are frozen together then.
func TestHoldWaitsForAnEarlierFreeze(t *testing.T) {
	for name, c := range map[string]struct {
		refusals int32
		held     bool
	}{"by a driver": {2, true}, "by somebody, for long": {9, false}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := &admin{volumes: []*adminv1.Volume{{Id: "1", VolumeId: "v"}, {Id: "2", VolumeId: "w"}}, left: "2"}
			a.refusals.Store(c.refusals)
			began := time.Now()
			f := &freezer{log: zaptest.NewLogger(t), limit: 5 * time.Second, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
			free, err := f.hold(t.Context(), []inUse{{"v", someFile}, {"w", someFile}}, func() error { a.called("take"); return nil })
			check.That(t, err == nil && (len(free) == 0) == c.held && time.Since(began) > f.limit, "free %q: %v", free, err)
			at := slices.Index(a.calls, "take")
			check.That(t, slices.Equal(slices.Sorted(slices.Values(a.calls[:at])), []string{
				"freeze 1 5s", "freeze 1 5s", "freeze 1 5s", "freeze 2 5s", "freeze 2 5s", "freeze 2 5s", "thaw 1", "thaw 1",
			}) && slices.Contains(a.calls[at:], "thaw 1") && slices.Contains(a.calls, "thaw 2") == c.held, "%q", a.calls)
		})
	}
}

// TestHoldSyncsFirst: a clean volume does not wait, frozen, until another one has been written to the disk.
func TestHoldSyncsFirst(t *testing.T) {
	a := &admin{volumes: []*adminv1.Volume{{Id: "1", VolumeId: "clean"}, {Id: "2", VolumeId: "busy"}}, dirty: "2", thawed: make(chan struct{}, 1)}
	f := &freezer{log: zaptest.NewLogger(t), limit: time.Minute, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
	free, err := f.hold(t.Context(), []inUse{{"clean", someFile}, {"busy", someFile}}, func() error { a.called("take"); return nil })
	check.That(t, len(free) == 0 && err == nil, "free %q: %v", free, err)
	synced := slices.Index(a.calls, "freeze 2 1m0s")
	check.That(t, slices.Equal(a.calls[:synced], []string{"freeze 1 1m0s", "thaw 1"}), "%q", a.calls)
}

// TestAnotherFilesystemIsNotFrozen: it may have come between the look at the mounts and the freeze.
func TestAnotherFilesystemIsNotFrozen(t *testing.T) {
	check.Is(t, check.Err(openRoot(t.TempDir(), "/dev/null")), fsops.ErrElsewhere)
}

// TestHoldWithoutCrustProxy takes what it can get.
func TestHoldWithoutCrustProxy(t *testing.T) {
	for _, socket := range []string{"", t.TempDir() + "/nobody"} {
		f := &freezer{log: zaptest.NewLogger(t), limit: time.Second, sandboxes: sandboxes{socket: socket}}
		taken := false
		free, err := f.hold(t.Context(), []inUse{{"v", someFile}}, func() error { taken = true; return nil })
		check.That(t, len(free) == 1 && err == nil && taken, "%q: free %v, taken %v, %v", socket, free, taken, err)
	}
}

// TestHoldFailsIfItMayPass: a snapshot stays as it was made, and would be a better one a moment later.
func TestHoldFailsIfItMayPass(t *testing.T) {
	restarting := t.TempDir() + "/s"
	check.StaleSocket(t, restarting)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for code, c := range map[codes.Code]struct {
		ctx    context.Context //nolint:containedctx // of one call
		socket string
	}{codes.Canceled: {cancelled, ""}, codes.Unavailable: {t.Context(), restarting}} {
		f := &freezer{log: zaptest.NewLogger(t), limit: time.Second, sandboxes: sandboxes{socket: c.socket}}
		check.Code(t, check.Err(f.hold(c.ctx, []inUse{{"v", someFile}}, func() error { t.Error("it was taken"); return nil })), code)
	}
}

// TestHoldOutlastsItsFreeze: what is thawed late is another caller's freeze.
func TestHoldOutlastsItsFreeze(t *testing.T) {
	a := &admin{volumes: []*adminv1.Volume{{Id: "1", VolumeId: "v"}}}
	f := &freezer{log: zaptest.NewLogger(t), limit: 20 * time.Millisecond, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
	free, err := f.hold(t.Context(), []inUse{{"v", someFile}}, func() error { time.Sleep(2 * f.limit); return nil })
	check.That(t, len(free) == 1 && err == nil, "free %q: %v", free, err)
}

// TestHoldFlushesTheDevice: a VMM without direct I/O leaves in the node's cache what the guest has not flushed.
func TestHoldFlushesTheDevice(t *testing.T) {
	check.NeedsRoot(t)
	image := sparse(t, 1<<20)
	device := check.Value(loopdev.Attach(image.Name(), loopdev.Options{DirectIO: true}))(t)
	defer func() { check.Must(t, loopdev.DetachFrom(image.Name(), device)) }()
	guest := check.Value(os.OpenFile(device, os.O_WRONLY, 0))(t)
	defer func() { check.Must(t, guest.Close()) }()
	var last byte
	a := &admin{volumes: []*adminv1.Volume{{Id: "1", VolumeId: "v"}}, freezes: func() {
		last++
		_, _ = guest.WriteAt(bytes.Repeat([]byte{last}, block), 0)
	}}
	f := &freezer{log: zaptest.NewLogger(t), limit: time.Minute, sandboxes: sandboxes{socket: a.serve(t), driver: "d"}}
	free, err := f.hold(t.Context(), []inUse{{"v", device}}, func() error {
		is := make([]byte, block)
		_, err := image.ReadAt(is, 0)
		check.That(t, last == 2 && is[0] == last, "the image has %d, and %d was written", is[0], last)
		return err
	})
	check.That(t, len(free) == 0 && err == nil, "free %q: %v", free, err)
}

// TestAnImageThatCannotBeRead is not known to be clean.
func TestAnImageThatCannotBeRead(t *testing.T) {
	image := sparse(t, 1<<20)
	check.That(t, !needsReplay(image) && isClean(image), "no filesystem")
	for at, magic := range map[int64]string{0: "XFSB", 1024 + 0x38: "\x53\xef", 64<<10 + 64: "_BHRfS_M"} { // and nothing else
		check.Value(image.WriteAt([]byte(magic), at))(t)
		check.That(t, needsReplay(image) && isClean(image) == (magic != "\x53\xef"), "the superblock with %q is damaged", magic)
		check.Value(image.WriteAt(make([]byte, len(magic)), at))(t)
	}
	check.Must(t, image.Close())
	check.That(t, needsReplay(image) && !isClean(image), "it was not read")
}

// TestSectorsAreOnRecord: a filesystem may not be mounted with others, as after the data directory has moved.
func TestSectorsAreOnRecord(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 1 << 30 })
	controller := csi.NewControllerClient(conn)
	pool := check.Value(openPool(config))(t)
	of := func(name string, from source) *record {
		t.Helper()
		return check.Value(pool.store.load(check.Value(created(t, controller, name, from))(t).GetVolumeId()))(t)
	}
	v := of("v", source{})
	check.Equal(t, v.Sector, pool.sectorSize, "sectors of a new volume")
	v.Sector = 2048
	check.Must(t, pool.store.save(v))
	clone := of("clone", source{Volume: v.ID})
	check.Equal(t, clone.Sector, 2048, "sectors of a clone")
	v.Sector = 0
	check.Must(t, errors.Join(pool.store.save(v), pool.sweep()))
	v = check.Value(pool.store.load(v.ID))(t)
	check.Equal(t, v.Sector, pool.sectorSize, "sectors of a volume of an earlier version")
	check.NeedsRoot(t)
	device := check.Value(pool.attach(clone, false))(t)
	defer func() { check.Must(t, pool.detach(clone.ID, false)) }()
	check.Equal(t, check.Value(sys.ReadLine("/sys/class/block/"+filepath.Base(device)+"/queue/logical_block_size"))(t), "2048", "sectors of its device")
}

// TestCleanWithoutJournal: an ext4 without a journal that was not unmounted is as after a crash.
func TestCleanWithoutJournal(t *testing.T) {
	config, conn, _ := start(t, func(c *Config) { c.CopyLimit = 1 << 30 })
	controller := csi.NewControllerClient(conn)
	v := check.Value(created(t, controller, "v", source{}))(t).GetVolumeId()
	pool := &pool{images: config.DataDir + "/images", store: store{dir: config.DataDir + "/volumes"}}
	super := make([]byte, 1024)
	super[0x4], super[0x38], super[0x39] = 1, 0x53, 0xef // blocks and magic
	for _, super[0x3a] = range []byte{0, 1} {            // state
		image := check.Value(pool.openImage(&record{ID: v}, os.O_WRONLY))(t)
		check.Must(t, errors.Join(check.Err(image.WriteAt(super, 1024)), image.Close()))
		r := check.Value(pool.store.load(takeSnapshot(t, controller, string('a'+super[0x3a]), v)))(t)
		check.That(t, r.consistent() == (super[0x3a] == 1), "state %d: %v", super[0x3a], r.Snapshot)
	}
}
