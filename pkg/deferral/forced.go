package deferral

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// heldRecord is a device that was released by force, until the kernel counts nobody who has it.
type heldRecord struct {
	Version  int            `json:"version"`
	Boot     string         `json:"boot"`
	Volume   *volume.Volume `json:"volume"`
	Sequence string         `json:"sequence,omitempty"` // see claim.Held
	Since    time.Time      `json:"since"`
}

func (s *store) heldPath(v *volume.Volume) string {
	return filepath.Join(s.dir, heldDir, fmt.Sprintf("%s.%d.%d.%d.json", v.Key, v.Device.Major, v.Device.Minor, v.Device.Inode))
}

// putHeld is called before the device is released.
func (s *store) putHeld(h claim.Held, boot string) error {
	raw, err := sys.EncodeJSON(&heldRecord{Version: recordVersion, Boot: boot, Volume: h.Volume, Sequence: h.Sequence, Since: h.Since}, maxRecord)
	if err != nil {
		return volume.Errorf(volume.Internal, "volume %s: the record cannot be encoded: %w", h.Volume.Target, err)
	}
	return s.write(h.Volume, s.heldPath(h.Volume), raw)
}

// dropHeld removes a record. One that cannot be removed is dropped at the next start.
func (s *store) dropHeld(v *volume.Volume) { _ = unix.Unlink(s.heldPath(v)) }

// loadHeld reads the records, and drops those of an earlier boot.
func (s *store) loadHeld(boot string) (all []claim.Held, problems []error) {
	names, err := os.ReadDir(filepath.Join(s.dir, heldDir))
	if err != nil {
		return nil, []error{volume.Errorf(volume.Internal, "the records of devices that were released by force cannot be read: %w", err)}
	}
	for _, name := range names {
		var rec heldRecord
		path := filepath.Join(s.dir, heldDir, name.Name())
		raw, err := sys.ReadSmall(path, maxRecord)
		if err == nil {
			err = json.Unmarshal(raw, &rec)
		}
		switch {
		case err == nil && rec.Boot != "" && rec.Boot != boot:
			_ = unix.Unlink(path)
		case err == nil && rec.Version <= recordVersion && rec.Volume != nil && rec.Volume.Device.Kind != "":
			all = append(all, claim.Held{Volume: rec.Volume, Sequence: rec.Sequence, Since: rec.Since})
		default:
			problems = append(problems, volume.Errorf(volume.Internal, "the record %s of a device that was released by force cannot be used: %w",
				path, errors.Join(err, errNoHeld)))
		}
	}
	return all, problems
}

var errNoHeld = errors.New("crustctl cannot show whether a process still has that device open, and the host is not kept from mounting it")

// noteForced records that the device of a volume is released by force.
func (r *remover) noteForced(v *volume.Volume) error {
	if v.Device.Kind == "" {
		return nil // it is not known
	}
	h := claim.Held{Volume: v, Sequence: claim.SequenceOf(v.Device), Since: time.Now().UTC()}
	if err := r.store.putHeld(h, r.boot); err != nil {
		return err
	}
	r.users.Force(h, r.store.dropHeld)
	return nil
}

// HeldOf returns the volumes of one volume of a driver that were released by force, and whose devices
// somebody still has open: it asks again.
func (u Users) HeldOf(ctx context.Context, driver, volumeID string) (out []Status) {
	isIt := func(v *volume.Volume) bool {
		return v.Origin != nil && v.Driver == driver && v.Origin.VolumeID == volumeID
	}
	if u.of == nil || !slices.ContainsFunc(u.of.Forced(), func(h claim.Held) bool { return isIt(h.Volume) }) {
		return nil
	}
	u.orphans.claims.Refresh(ctx, isIt)
	for _, h := range u.of.Forced() {
		if isIt(h.Volume) {
			out = append(out, HeldStatus(h))
		}
	}
	return out
}
