// Package front is the CSI side of crust-proxy: it stands between kubelet and a
// CSI driver's node plugin. A volume that is not deferred passes through byte
// for byte. For one that is, the driver is asked for a device only, and the
// filesystem is left to the pod's sandbox.
package front

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
)

// Volumes is what the front needs of the broker.
type Volumes interface {
	Stage(ctx context.Context, in deferral.Instruction) (*deferral.Volume, error)
	Unstage(ctx context.Context, target string) (*deferral.Volume, error)
	Find(target string) (deferral.Status, bool, error)
	OfCSI(driver, volumeID string) []deferral.Status
	DeviceSize(v *deferral.Volume) (int64, bool)
	GrowAtMount(ctx context.Context, key deferral.Key, size int64) error
	Abilities(handler string) deferral.Abilities
	KeyOfTarget(target string) (deferral.Key, error)
}

// Sandboxes is what the front asks of the sandboxes of volumes.
type Sandboxes interface {
	Stats(ctx context.Context, v *deferral.Volume) (stats.Answer, error)
	Known(v *deferral.Volume) (stats.Known, bool)
	Expand(ctx context.Context, v *deferral.Volume, wish deferral.Range) (int64, error)
	Binding(v *deferral.Volume) (runtime.Binding, bool)
}

// Pod is what decides about the volumes of a pod.
type Pod struct {
	UID, Namespace, Name string
	// RuntimeHandler is that of the pod's runtime class; "" is the node's
	// default runtime.
	RuntimeHandler string
	// FSGroup shall own the files of its volumes; "" is none.
	FSGroup       string
	FSGroupPolicy deferral.GroupPolicy
	// Asks is the value of the pod's annotation AnnotationDefer, as it stands
	// there: anybody who may make a pod can write it.
	Asks string
	// Volumes are those of the pod that a CSI driver gives.
	Volumes []PodVolume
}

// PodVolume is a volume of a pod, and what its containers do with it.
type PodVolume struct {
	// Name is its name in the pod.
	Name string
	// Driver and VolumeID are CSI's. Both are empty where they are Unknown.
	Driver, VolumeID string
	// Unknown says why it is not known who gives the volume: a claim that is not
	// bound yet, or a cluster that does not answer. It is a classed error.
	Unknown error
	// Block is set for a raw block volume, which has no filesystem.
	Block bool
	// NoGroup is set where the pod's FSGroup is not for this volume: the node's own
	// kernel would not have changed its files either.
	NoGroup bool
	// SubPaths are those of the pod's containers, init containers among them:
	// subPath, or subPathExpr as it is written.
	SubPaths []string
	// ReadOnlyMounts is set where every container that mounts it does so
	// read-only. A container that is added later may do otherwise.
	ReadOnlyMounts bool
}

// AnnotationDefer is the annotation by which a pod asks for its volumes to be
// deferred: their names in the pod, with commas between, or "*".
const AnnotationDefer = deferral.AnnotationKey

// Pods tells of the pods of this node. Its errors are classed; a pod that it does
// not know is an error, never a guess.
type Pods interface {
	// ByUID gives the pod that a volume is published for.
	ByUID(ctx context.Context, uid string) (Pod, error)
	// Using gives the pods of this node that want a volume: a stage names none.
	Using(ctx context.Context, driver, volumeID string) ([]Pod, error)
}

// Config is what a Front is made of.
type Config struct {
	Volumes   Volumes
	Sandboxes Sandboxes
	// Pods is nil where no cluster is asked: then nothing is known of pods but
	// what CSI says.
	Pods Pods
	// StateDir holds the front's records, on tmpfs.
	StateDir string
	// KubeletRoot is kubelet's directory, and PrivateDir, below its plugins
	// directory, where drivers are asked to put devices.
	KubeletRoot string
	PrivateDir  string
	// DefaultFSType is the filesystem where a volume names none.
	DefaultFSType string
	// DriverTimeout bounds a call to a driver whose caller set no deadline.
	DriverTimeout time.Duration
	// DefaultHandler is the runtime handler where a rule names none.
	DefaultHandler string
	Policy         *deferral.Policy
	// OnRefused is told of each call that refused a volume, and OnChange of each
	// volume that is listed as refused, or not any more. They must not block and
	// may be nil.
	OnRefused func(driver string, party deferral.Party)
	OnChange  func(deferral.Key)
	Log       *zap.Logger
}

// Front decides which volumes are deferred, and defers them.
type Front struct {
	cfg     Config
	policy  atomic.Pointer[deferral.Policy]
	records *records
	private *privatePaths
	turns   turns
	memory  stageMemory
	refused *refusals
}

// New reads the records of an earlier life.
func New(cfg Config) (*Front, error) {
	found, err := openRecords(filepath.Join(cfg.StateDir, recordDir), cfg.Log)
	if err != nil {
		return nil, err
	}
	private, err := newPrivatePaths(cfg.KubeletRoot, cfg.PrivateDir)
	if err != nil {
		return nil, err
	}
	f := &Front{cfg: cfg, records: found, private: private, refused: newRefusals(cfg.OnChange)}
	f.SetPolicy(cfg.Policy)
	return f, nil
}

// SetPolicy puts rules in force for what is decided from now on. Volumes that a
// pod has keep the verdict they were given.
func (f *Front) SetPolicy(p *deferral.Policy) { f.policy.Store(p) }
