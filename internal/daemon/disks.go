package daemon

import (
	"cmp"
	"context"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/disk/ondisk"
	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// How old a superblock in the cache may be. While a growth is on record, which is rare, it is read more often.
const (
	diskAge   = time.Minute
	growthAge = 5 * time.Second
)

// disks reads the superblocks of filesystems, and makes filesystems.
type disks struct {
	reader    *ondisk.Reader
	formatter *mkfs.Formatter
}

// Matches reports whether a filesystem of this size can be the one on a volume's device.
// The size changes rarely, so an old superblock will do.
func (d *disks) Matches(v *volume.Volume, bytes, inodes int64) (is, known bool) {
	super := d.reader.Super(v, diskAge)
	if super == nil {
		return false, false
	}
	return super.Is(bytes, inodes), true
}

// FillsDevice reports whether the filesystem of a volume is known to be as large as its
// device. It reads the superblock again, because kubelet asks for a growth only once.
func (d *disks) FillsDevice(v *volume.Volume, device int64) bool {
	super := d.reader.Super(v, 0)
	return super != nil && super.Fills(device)
}

// HeaderSize returns how many bytes of a volume its device may lack.
func (*disks) HeaderSize(v *volume.Volume) int64 { return claim.HeaderSize(v.Device) }

// hasGrown reports whether the growth on record for a volume is known to be done.
func (d *disks) hasGrown(v *volume.Volume) bool {
	super := d.reader.Super(v, growthAge)
	return super != nil && super.Fills(v.GrowTo)
}

// Condition returns the errors that a filesystem has recorded. If there are none, the
// condition is unknown: an error may have occurred and not been recorded.
func (d *disks) Condition(v *volume.Volume) *volume.Condition {
	super := d.reader.Super(v, diskAge)
	if super == nil || super.Errors == nil {
		return nil
	}
	return &volume.Condition{Abnormal: true, Message: super.Errors.Words(), Reason: abi.ReasonErrors}
}

// LacksGroup reports whether the root directory of a volume is not known to be writable for the volume's group. The
// group of a read-only volume means nothing to any sandbox.
func (d *disks) LacksGroup(v *volume.Volume) bool {
	super := d.reader.Super(v, diskAge)
	return !v.ReadOnly && (super == nil || super.Root == nil || !super.Root.WritableFor(v.Group))
}

// Prepare examines a device, and formats it if the policy says so.
func (d *disks) Prepare(ctx context.Context, asked deferral.Preparation) error {
	v, policy := asked.Volume, asked.Instruction.Format
	if policy == volume.FormatGuest {
		// No handler's sandboxes can be trusted to format only a blank device: a sandbox
		// that is created again would format again.
		policy = volume.FormatNever
	}
	var id string
	if v.Origin != nil {
		id = writerID(v.Driver, v.Origin.VolumeID)
	}
	request := mkfs.Request{
		ID:     id,
		Device: asked.Device, Volume: v.Target, Path: v.Device.Path, FSType: v.FSType, Policy: policy,
		ReadOnly: v.ReadOnly || policy == volume.FormatDriver && !asked.Grow,
		Options:  asked.Instruction.MakeFS.Options, Root: rootOf(v.Group, asked.Instruction.MakeFS.RootMode), Grow: asked.Grow,
	}
	if policy != volume.FormatUnset {
		if _, err := d.formatter.Prepare(ctx, request); err != nil {
			return err
		}
	}
	if !v.ReadOnly || asked.NoReplay {
		return nil
	}
	return d.formatter.CheckReplay(ctx, request)
}

// Writing returns an error while a program that was started by Prepare writes to the device of a CSI volume.
func (d *disks) Writing(driver, volumeID string) error {
	return d.formatter.CheckWriting(writerID(driver, volumeID))
}

// writerID identifies a CSI volume for the formatter. No driver's name has a slash.
func writerID(driver, volumeID string) string { return driver + "/" + volumeID }

// rootOf returns owner and mode of a new filesystem's root directory. The group may write, as
// after kubelet's own change, so that no sandbox has to change it.
func rootOf(group string, mode uint32) mkfs.Root {
	const groupWrites = 0o2070
	root := mkfs.Root{Mode: mode}
	gid, err := strconv.ParseUint(group, 10, 32)
	if err == nil && gid != 0 {
		root.Group, root.Mode = uint32(gid), cmp.Or(mode, 0o755)|groupWrites
	}
	return root
}

// newOpeners makes the finder of who has a device open, and logs how it proves that nobody has.
func newOpeners(log *zap.Logger) *openers.Finder {
	began := time.Now()
	finder := openers.New()
	method, why := finder.Method()
	took := zap.Duration(telemetry.FieldDuration, time.Since(began))
	if why == nil {
		log.Info("the kernel counts who has a device open", took, zap.NamedError("unseen", openers.InFirstNamespace()))
		return finder
	}
	log.Warn("the kernel's count of who has a device open cannot be used: the descriptors of all processes are read instead",
		zap.String("method", string(method)), zap.Error(why), took)
	if err := finder.Blind(); err != nil {
		log.Error("it cannot be seen who has a device open: no volume can be staged or unstaged", zap.Error(err))
	}
	return finder
}

func describeProof(finder *openers.Finder) (proof, reason string) {
	method, why := finder.Method()
	if why != nil {
		reason = why.Error()
	}
	return string(method), reason
}
