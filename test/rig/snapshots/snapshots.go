// Package snapshots looks at snapshots that crust-driver has taken.
package snapshots

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
)

// Seconds is how long a database runs.
func Seconds() int {
	if rig.Soak() {
		return 60
	}
	return 3
}

// Moment is a snapshot, and how many records were acknowledged before and after it.
type Moment struct {
	ID            string
	Before, After uint64
}

// Want fails unless there are all records that were acknowledged before the snapshot, and none of later.
func (m Moment) Want(t rig.T, count uint64) {
	t.Helper()
	check.That(t, count >= m.Before && count <= m.After+1, "%d records, and %d to %d were acknowledged", count, m.Before, m.After)
}

// Image is the path of the image of a volume or snapshot of crust-driver's.
func Image(data, id string) string {
	return fmt.Sprintf("%s/images/%x.img", data, sha256.Sum256([]byte(id)))
}

// Consistent reads what crust-driver's record of a snapshot says.
func Consistent(t rig.T, data, id string) bool {
	t.Helper()
	records := check.Value(filepath.Glob(data + "/volumes/*.json"))(t)
	for _, path := range records {
		raw := check.Value(os.ReadFile(path))(t)
		var record struct {
			ID       string `json:"id"`
			Snapshot struct {
				Consistent bool `json:"consistent"`
			} `json:"snapshot"`
		}
		check.Must(t, json.Unmarshal(raw, &record))
		if record.ID == id {
			return record.Snapshot.Consistent
		}
	}
	t.Fatalf("there is no record of %s", id)
	return false
}

// AsItIs calls look with the filesystem on an image as it is there: nothing can be written, and no journal is replayed.
func AsItIs(t rig.T, image, fs string, look func(dir string)) error {
	t.Helper()
	device := check.Value(loopdev.Attach(image, loopdev.Options{ReadOnly: true}))(t)
	defer func() { check.Must(t, loopdev.Detach(device)) }()
	dir := t.TempDir()
	options := mountopt.NoReplay(fs)
	if fs == "xfs" {
		options += ",nouuid"
	}
	if err := unix.Mount(device, dir, fs, unix.MS_RDONLY, options); err != nil {
		return err
	}
	// Whoever looks through the machine's processes may be in a file there for a moment.
	defer func() { check.Succeeds(t, "unmount", func() error { return unix.Unmount(dir, 0) }) }()
	look(dir)
	return nil
}

// NeedsReplay tells whether a filesystem is repaired when it is mounted.
func NeedsReplay(t rig.T, image, fs string) bool {
	t.Helper()
	file := check.Value(os.Open(image))(t)
	dirty, err := superblock.NeedsReplay(file, fs)
	check.Must(t, errors.Join(err, file.Close()))
	return dirty
}

// WantClean takes a snapshot of a volume to which a pod has just written "written" in the file "unsynced": the
// sandbox's freeze has brought that to the disk, with nothing to be repaired.
func WantClean(t rig.T, v *csivolume.Volume, data string) {
	t.Helper()
	id := check.Value(v.Snapshot("frozen-" + v.FS))(t)
	image, consistent := Image(data, id), Consistent(t, data, id)
	check.That(t, consistent && (v.FS == "xfs" || !NeedsReplay(t, image, v.FS)), // a frozen xfs has something in its log on purpose
		"the snapshot of %s is consistent: %t, or a journal has to be replayed", v.FS, consistent)
	check.Must(t, AsItIs(t, image, v.FS, func(dir string) {
		raw, err := os.ReadFile(dir + "/unsynced")
		check.That(t, string(raw) == "written\n", "the snapshot of %s has %q, %v", v.FS, raw, err)
	}))
	v.DeleteSnapshot(id)
}
