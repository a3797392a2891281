package mkfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// checkWait is how long a volume waits for e2fsck to end for another one.
const checkWait = time.Minute

// growth grows an ext4 that is smaller than its device, for example after a restore or a clone into a larger volume. A
// failure does not stop the pod: the sandbox gets the filesystem as it is, and the log has the reason. Only a
// filesystem whose growth is on record as interrupted, and that e2fsck cannot repair by itself, is refused.
//
// Here programs of this node parse a filesystem that somebody else wrote. e2fsck is killed when
// it takes too long, and only one runs at a time; resize2fs is never killed.
type growth struct {
	j    *job
	uuid string
	// cutOff: by this node's record, an earlier growth was interrupted, so e2fsck must find the filesystem sound.
	cutOff bool
}

func (g *growth) run(ctx context.Context) error {
	if g.j.req.FSType != "ext4" {
		g.warnIfSmall(ctx)
		return nil
	}
	needed, err := g.needed(ctx)
	if err != nil || !needed {
		return err
	}
	log := g.j.f.cfg.Log.With(zap.String("target", g.j.req.Volume), zap.String("device", g.j.req.Path), zap.Int64("size", g.j.dev.size))
	began := time.Now()
	why, err := g.grow(ctx)
	if err != nil {
		return err
	}
	if why != "" {
		log.Warn("the filesystem of a device could not be grown, or not completely: the sandbox gets it as it is", zap.String("reason", why))
		return nil
	}
	log.Info("grew a filesystem to the size of its device", zap.Duration("duration", time.Since(began)))
	return nil
}

// warnIfSmall logs that a filesystem, which programs grow only while it is mounted, is smaller than its device.
func (g *growth) warnIfSmall(ctx context.Context) {
	if !g.j.req.Grow || g.j.req.ReadOnly {
		return
	}
	if super, err := g.measure(ctx); err == nil && super.Bytes <= g.j.dev.size && !super.Fills(g.j.dev.size) {
		g.j.f.cfg.Log.Warn("a filesystem is smaller than its device, and the node grows only an ext4: the sandbox gets it as it is, and a pod "+
			"without sandbox grows it, by thenOnHost: allow in the policy's rule", zap.String("target", g.j.req.Volume),
			zap.String("device", g.j.req.Path), zap.String("filesystem", g.j.req.FSType), zap.Int64("size", g.j.dev.size))
	}
}

func (g *growth) needed(ctx context.Context) (needed bool, err error) {
	begun, uuid, err := g.j.dev.intent.begun()
	if err != nil {
		return false, g.j.dev.errorf(volume.Internal, "%w", err)
	}
	growing, may := begun == workGrowing, g.j.req.Grow && !g.j.req.ReadOnly
	if !growing && !may {
		return false, nil
	}
	super, err := g.measure(ctx)
	if err != nil {
		return false, g.unknown(growing, err)
	}
	if g.cutOff = growing && super.UUID == uuid; g.cutOff && !may {
		return false, g.repairedByHand(super)
	}
	g.uuid = super.UUID
	// An interrupted resize2fs also leaves the error state without a count, but so does an e2fsck that gives up.
	suspect := super.Errors != nil && super.Errors.Count == 0
	return g.cutOff || may && (suspect || super.Bytes <= g.j.dev.size && !super.Fills(g.j.dev.size)), nil
}

// unknown is the error if the sizes are not known. Only a growth that was cut off needs them.
func (g *growth) unknown(growing bool, err error) error {
	switch {
	case !growing:
		return nil
	case errors.Is(err, errUnreadable):
		return g.refuse(err.Error())
	default: // nothing is known of the filesystem
		return err
	}
}

// repairedByHand ends the record of a filesystem that we may not check ourselves. resize2fs
// marks it as one with errors while it works, and e2fsck takes the mark off.
func (g *growth) repairedByHand(super *superblock.Super) error {
	if super.Clean {
		return g.j.endIntent()
	}
	return g.refuse("it is not checked, because the volume is read-only, its rule has grow: false, or its runtime handler grows it")
}

var errUnreadable = errors.New("its superblock cannot be read")

// measure reads the superblock, and the size of the device.
func (g *growth) measure(ctx context.Context) (super *superblock.Super, err error) {
	file, err := g.j.dev.openAlone(ctx, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer sys.CloseFileAlone(file)
	super, err = superblock.Read(file, g.j.req.FSType)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	g.j.dev.size, err = file.Seek(0, io.SeekEnd)
	return super, err
}

// grow checks and grows the filesystem. If it did not, why has the reason.
func (g *growth) grow(ctx context.Context) (why string, err error) {
	turn, err := g.turn(ctx, checkWait)
	if err != nil {
		if volume.KindOf(err) == volume.Busy && !g.cutOff {
			return err.Error(), nil
		}
		return "", err
	}
	defer sys.CloseFileAlone(turn)
	if err := g.j.beginMaking(ctx); err != nil {
		return "", err
	}
	why, sound := g.resize(context.WithoutCancel(ctx), turn)
	if !sound {
		return "", g.refuse(why)
	}
	return why, nil
}

// turn waits until no e2fsck runs for another volume of this node. The turn ends when the file
// is closed: no program inherits it.
func (g *growth) turn(ctx context.Context, wait time.Duration) (*os.File, error) {
	file, err := g.j.dev.lockByte(ctx, checkingByte, wait)
	if err == nil && file == nil {
		err = g.j.dev.errorf(volume.Busy, "holds an ext4 that must be checked, while e2fsck runs for another volume of this node: "+
			"repeat the call")
	}
	return file, err
}

// refuse is the error for a filesystem that an interrupted resize2fs may have left inconsistent.
func (g *growth) refuse(why string) error {
	return g.j.dev.errorf(unmet, "holds an ext4 whose growth was cut off: %s. Run e2fsck -f on the device by hand, and publish again; "+
		"or restore the volume. This is on record in %s", why, g.j.dev.intent)
}

// resize grows the filesystem. If that failed, why has the reason; sound is false if the filesystem must not be used.
func (g *growth) resize(ctx context.Context, turn *os.File) (why string, sound bool) {
	program, err := g.j.f.tool("resize2fs")
	if err != nil {
		return err.Error(), !g.cutOff
	}
	if why := g.fsck(ctx, turn); why != "" {
		return why, !g.cutOff
	}
	if err := g.j.dev.intent.begin(workGrowing, g.uuid); err != nil {
		return err.Error(), true
	}
	failpoint.Hit("format-before-resize")
	ran, err := program.run(ctx, confine.Box{Device: g.j.dev.file}, []*os.File{g.j.dev.file, g.j.dev.lock}, childDevice)
	switch {
	case err != nil:
		why = "resize2fs could not be run: " + err.Error()
	case ran.failed():
		why = "resize2fs failed (" + ran.how() + "): " + ran.text()
	}
	if why != "" {
		if still := g.fsckAgain(ctx); still != "" {
			return why + "; after that, " + still, false
		}
	}
	if err := g.j.dev.intent.end(); err != nil {
		return strings.TrimPrefix(why+"; ", "; ") + err.Error(), true
	}
	return why, true
}

func (g *growth) fsckAgain(ctx context.Context) (why string) {
	turn, err := g.turn(ctx, g.j.f.cfg.Timeout)
	if err != nil {
		return err.Error()
	}
	return g.fsck(ctx, turn)
}

// fsck runs e2fsck, and returns why the filesystem is not sound, or "". It ends the turn, even if the kernel
// does not let e2fsck end.
func (g *growth) fsck(ctx context.Context, turn *os.File) (why string) {
	defer sys.CloseFileAlone(turn)
	program, err := g.j.f.tool("e2fsck")
	if err != nil {
		return err.Error()
	}
	bounded, cancel := context.WithTimeout(ctx, g.j.f.cfg.Timeout/2)
	defer cancel()
	defer context.AfterFunc(bounded, func() { sys.CloseFileAlone(turn) })()
	ran, err := program.run(bounded, g.j.dev.box(), []*os.File{g.j.dev.file, g.j.dev.lock}, "-f", "-p", childDevice)
	const repaired = 1
	switch {
	case bounded.Err() != nil:
		return "e2fsck took longer than " + (g.j.f.cfg.Timeout / 2).String() + " and was ended"
	case err != nil:
		return "e2fsck could not be run: " + err.Error()
	case ran.Signal != 0 || ran.Code > repaired:
		return "e2fsck found errors that it does not repair by itself (" + ran.how() + "): " + ran.text()
	}
	return ""
}
