// Package csi is the CSI side of crust-proxy: it stands between kubelet and a CSI driver's node plugin. A volume that is
// not deferred passes through byte for byte, except its health. For one that is, the driver is asked for a device only,
// and the filesystem is left to the pod's sandbox.
package csi

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/rpccode"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Volumes is what the front needs of the broker.
type Volumes interface {
	Defer(ctx context.Context, in volume.Instruction) (*volume.Volume, error)
	Release(ctx context.Context, target string) (*volume.Volume, error)
	KeyOfTarget(target string) (volume.Key, error)
	Get(key volume.Key) (deferral.Status, bool)
	OfOrigin(driver, volumeID string) []deferral.Status
	Lost() []deferral.Status
	// Users lists what was released by force, and is still in use.
	Users() deferral.Users
	DeviceSize(v *volume.Volume) (int64, bool)
	GrowAtMount(ctx context.Context, key volume.Key, size int64) error
	Abilities(handler string) deferral.Abilities
}

// Sandboxes is what the front asks of the sandboxes of volumes.
type Sandboxes interface {
	Stats(ctx context.Context, v *volume.Volume) (stats.Answer, error)
	Known(v *volume.Volume) (stats.Known, bool)
	Expand(ctx context.Context, v *volume.Volume, wish volume.Range) (int64, error)
	// MayRun reports whether a sandbox has the volume. What cannot be found out counts as one.
	MayRun(ctx context.Context, v *volume.Volume) bool
}

// Disks is what the front asks about the devices of volumes.
type Disks interface {
	// Writing returns an error while a program of this node, such as mkfs, writes to the device of a volume.
	Writing(driver, volumeID string) error
	// FillsDevice reports whether a volume's filesystem is known to be as large as its
	// device, which has that many bytes.
	FillsDevice(v *volume.Volume, device int64) bool
	// HeaderSize returns how many bytes of a volume its device may lack: the header of an encrypted one.
	HeaderSize(v *volume.Volume) int64
	// LacksGroup reports whether the root directory of a volume's filesystem is not known
	// to be writable for the volume's group.
	LacksGroup(v *volume.Volume) bool
}

// Pods looks up the pods of this node. Its errors are classed; a pod that it does not know is an error, never a guess.
type Pods interface {
	// ByUID returns the pod that a volume is published for.
	ByUID(ctx context.Context, uid string) (decision.Pod, error)
	// Using returns the pods of this node that use a volume: a stage names none.
	Using(ctx context.Context, driver, volumeID string) ([]decision.Pod, error)
}

// Config configures a Front.
type Config struct {
	Volumes   Volumes
	Sandboxes Sandboxes
	Disks     Disks
	// Pods is nil where no cluster is asked. Then only what CSI says is known of pods.
	Pods Pods
	// StateDir holds the front's records, on tmpfs.
	StateDir string
	// KubeletRoot is kubelet's directory, and PrivateDir, below its plugins
	// directory, where drivers are asked to put devices.
	KubeletRoot, PrivateDir string
	// MarksDir has a mark of each volume that a sandbox had read-write, on a disk. MarksMade is the
	// file that records that it was created; empty is nowhere.
	MarksDir, MarksMade string
	// DefaultFSType is the filesystem where a volume names none.
	DefaultFSType string
	// VolumeCondition offers kubelet the capability VOLUME_CONDITION of CSI 1.12 and earlier.
	VolumeCondition bool
	// DriverTimeout bounds a call to a driver whose caller set no deadline.
	DriverTimeout time.Duration
	// DefaultHandler is the runtime handler where a rule names none.
	DefaultHandler string
	Policy         *policy.Policy
	// Refusals lists the volumes that could not be deferred.
	Refusals *refusal.List
	Log      *zap.Logger
}

// Front decides which volumes are deferred, and defers them.
type Front struct {
	cfg           Config
	rules         atomic.Pointer[decision.Rules]
	store         *staging.Store
	locks         sys.KeyLocks[staging.VolumeID]
	healthTimeout time.Duration // longer in tests
}

// New reads the records that an earlier process left.
func New(cfg Config) (*Front, error) {
	store, err := staging.OpenStore(cfg.StateDir, cfg.KubeletRoot, cfg.PrivateDir, staging.OpenMarks(cfg.MarksDir, cfg.MarksMade, cfg.Log), cfg.Log)
	if err != nil {
		return nil, err
	}
	f := &Front{cfg: cfg, store: store, healthTimeout: healthTimeout}
	f.SetPolicy(cfg.Policy)
	return f, nil
}

// SetPolicy replaces the rules for later decisions. Volumes that a pod has keep their verdict.
func (f *Front) SetPolicy(p *policy.Policy) {
	f.rules.Store(&decision.Rules{Policy: p, DefaultHandler: f.cfg.DefaultHandler, Abilities: f.cfg.Volumes.Abilities})
}

// StagedDevices returns the volumes that are staged as devices: only the front can have them unstaged.
func (f *Front) StagedDevices() []staging.Staged { return f.store.Records.StagedDevices() }

// Driver makes the proxy that kubelet uses in place of the driver. Of one that has not reported capabilities has is nil.
func (f *Front) Driver(name string, has *csi.NodeGetCapabilitiesResponse, conn grpc.ClientConnInterface) *passthrough.Proxy {
	p := &driverProxy{
		front: f, cfg: &f.cfg, volumes: f.cfg.Volumes, records: f.store.Records, private: f.store.Private, marks: f.store.Marks,
		driver: staging.NewDriver(name, conn, f.cfg.Disks.Writing), log: f.cfg.Log.With(zap.String(telemetry.FieldDriver, name)),
	}
	if has != nil {
		p.driver.ObserveCapabilities(has)
	}
	p.stager = staging.NewStager(p.driver, f.store, p.couldDefer, p.log)
	local := make(map[string]passthrough.Local, len(intercepted))
	for method, answer := range intercepted {
		local[method] = func(ctx context.Context, raw []byte, forward passthrough.Forward) ([]byte, error) {
			if _, ok := ctx.Deadline(); !ok {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, f.cfg.DriverTimeout)
				defer cancel()
			}
			var drivers error
			reply, err := answer(ctx, p, raw, func(ctx context.Context) (reply []byte, err error) {
				reply, drivers = forward(ctx, raw)
				telemetry.CallFrom(ctx).Forwarded = drivers != nil
				return reply, drivers
			})
			if err == drivers { //nolint:errorlint // the driver's own answer, which passes as it is; one that is wrapped is ours
				return reply, err
			}
			return reply, rpccode.Status(err)
		}
	}
	return passthrough.New(conn, local)
}

// refuseLost returns an error if the broker has lost the record of a volume with another key than
// this one, and the private path shows that it is this volume: a sandbox may have the device.
func (f *Front) refuseLost(id staging.VolumeID, key volume.Key) error {
	for _, lost := range f.cfg.Volumes.Lost() {
		for _, at := range []string{lost.Target, lost.ResolvedTarget} {
			if at == "" || lost.Key == key {
				continue
			}
			switch is, err := f.store.Private.Published(id, at); {
			case err != nil:
				return err
			case is:
				return recordLost(id, at)
			}
		}
	}
	return nil
}

// refuseHeld returns an error if a volume was released by force and somebody still has its device, so that a
// mount on the host would destroy its filesystem.
func (f *Front) refuseHeld(ctx context.Context, id staging.VolumeID) error {
	users := f.cfg.Volumes.Users()
	for _, held := range users.HeldOf(ctx, id.Driver, id.ID) {
		return refusal.WithParty(refusal.PartyVolume, stillHeld(id, &held))
	}
	return nil
}

// find looks up the volume at a target, and returns nil if there is none. A target outside the kubelet root has none.
// After any other error it is not known whether the volume is deferred, so the driver must not be asked to act on it.
func (f *Front) find(target string) (key volume.Key, found *deferral.Status, err error) {
	key, err = f.cfg.Volumes.KeyOfTarget(target)
	switch {
	case err == nil:
		if status, known := f.cfg.Volumes.Get(key); known {
			found = &status
		}
		return key, found, nil
	case volume.KindOf(err) == volume.Invalid:
		return volume.KeyOf(target), nil, nil
	default:
		return "", nil, notLookedUp(target, err)
	}
}
