package staging

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Mark says that a sandbox has had a volume read-write: the node's kernel must not parse what
// a guest may have written.
type Mark struct {
	Driver   string `json:"driver"`
	VolumeID string `json:"volumeID"`
	// Rule is the policy's rule that deferred the volume, and Handler the runtime handler that
	// got it.
	Rule    string    `json:"rule"`
	Handler string    `json:"handler"`
	Since   time.Time `json:"since"`
}

const maxMark = 64 << 10

// Marks keeps a file for each marked volume in a directory that survives a reboot. No call lists
// the directory. A deleted volume's mark stays, and the number of marks is not limited: a limit
// would have to drop marks, or refuse all new volumes after one tenant had created many.
type Marks struct{ dir string }

func openMarks(dir string, log *zap.Logger) *Marks {
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = sys.SyncDir(filepath.Dir(dir)) // else a power cut could take the whole directory
	}
	if err != nil {
		log.Error("the directory of marks cannot be created and synced: while it is missing, each volume that needs a mark is refused", zap.String("path", dir), zap.Error(err))
	}
	return &Marks{dir: dir}
}

// Path is where the mark of a volume is, if there is one.
func (m *Marks) Path(id VolumeID) string { return filepath.Join(m.dir, FileName(id)) }

// Get returns the mark of a volume, or nil. After an error it is not known whether the volume is
// marked. A file that cannot be parsed counts as a mark.
func (m *Marks) Get(id VolumeID) (*Mark, error) {
	raw, err := sys.ReadSmall(m.Path(id), maxMark)
	if errors.Is(err, fs.ErrNotExist) {
		// If the directory is missing, it is not known.
		_, err = os.Lstat(m.dir)
		return nil, err
	}
	if err != nil {
		return nil, err
	}
	mark := &Mark{}
	if json.Unmarshal(raw, mark) != nil {
		return &Mark{Driver: id.Driver, VolumeID: id.ID, Rule: "the mark cannot be parsed"}, nil
	}
	return mark, nil
}

// Put marks a volume, and returns when the mark is on the disk.
func (m *Marks) Put(mark Mark) error {
	id := VolumeID{mark.Driver, mark.VolumeID}
	raw, err := sys.EncodeJSON(mark, maxMark)
	if err == nil {
		err = sys.WriteSynced(m.Path(id), raw)
	}
	if err != nil {
		return markError(id, m.dir, err)
	}
	return nil
}

// Remove removes a mark of a volume that no sandbox got.
func (m *Marks) Remove(id VolumeID) error {
	if err := os.Remove(m.Path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return markError(id, m.dir, err)
	}
	return nil
}
