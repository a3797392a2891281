package staging

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

const maxMark = 64 << 10

// Marks keeps a file for each marked volume in a directory that survives a reboot. No call lists
// the directory. A deleted volume's mark stays, and the number of marks is not limited: a limit
// would have to drop marks, or refuse all new volumes after one tenant had created many.
type Marks struct{ dir string }

// OpenMarks creates the directory on a new node. made is a file that records this, or empty: a directory that is
// missing later (its disk is not mounted, or the key was changed) would come back without its marks.
func OpenMarks(dir, made string, log *zap.Logger) *Marks {
	var err error
	if _, before := os.Lstat(made); errors.Is(before, fs.ErrNotExist) {
		err = createMarks(dir, made)
	} else if _, err = os.Stat(dir); err != nil {
		err = marksGone(made, dir, err)
	}
	if err != nil {
		log.Error("the directory of marks is not as it should be: while it is missing, each volume that needs a mark is refused", zap.String("path", dir), zap.Error(err))
	}
	return &Marks{dir: dir}
}

func createMarks(dir, made string) error {
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = sys.SyncDir(filepath.Dir(dir)) // else a power cut could take the whole directory
	}
	if err == nil && made != "" {
		if err = errors.Join(os.MkdirAll(filepath.Dir(made), 0o700), sys.WriteSynced(made, []byte(dir+"\n"))); err != nil {
			err = fmt.Errorf("it is there, but a start without it would create it anew: %w", err)
		}
	}
	return err
}

func (m *Marks) path(id VolumeID) string { return filepath.Join(m.dir, FileName(id)) }

// Get returns the mark of a volume, or nil. A file that cannot be parsed counts as a mark.
func (m *Marks) Get(id VolumeID) *decision.Mark {
	path := m.path(id)
	raw, err := sys.ReadSmall(path, maxMark)
	if errors.Is(err, fs.ErrNotExist) {
		// If the directory is missing, it is not known.
		if _, err = os.Stat(m.dir); err == nil {
			return nil
		}
	}
	if err != nil {
		return &decision.Mark{Path: path, Err: err}
	}
	mark := &decision.Mark{Path: path}
	if json.Unmarshal(raw, mark) != nil {
		return &decision.Mark{Path: path, Rule: "the mark cannot be parsed"}
	}
	return mark
}

// Put marks a volume, and returns when the mark is on the disk.
func (m *Marks) Put(mark *decision.Mark) error {
	id := VolumeID{mark.Driver, mark.VolumeID}
	raw, err := sys.EncodeJSON(mark, maxMark)
	if err == nil {
		err = sys.WriteSynced(m.path(id), raw)
	}
	if err != nil {
		return markError(id, m.dir, err)
	}
	return nil
}

// Remove removes a mark of a volume that no sandbox got.
func (m *Marks) Remove(id VolumeID) error {
	if err := os.Remove(m.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return markError(id, m.dir, err)
	}
	return nil
}
