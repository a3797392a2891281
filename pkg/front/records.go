package front

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// recordDir holds the records, below the state directory.
const recordDir = "csi"

// recordVersion is the form of the records written.
const recordVersion = 1

// volumeRecord is what the front has to remember of a CSI volume besides what the
// broker does: how the driver was asked to stage it, and which pods have it
// without deferral. It holds no secret.
type volumeRecord struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
	Driver  string `json:"driver"`
	ID      string `json:"volumeID"`
	// Stage is nil where the volume is not staged.
	Stage *stageRecord `json:"stage,omitempty"`
	// Plain are the targets that the driver itself has mounted.
	Plain []string `json:"plain,omitempty"`
}

// stageRecord is a stage that kubelet asked for.
type stageRecord struct {
	// Path is kubelet's staging path, and Private where the driver stages a
	// device instead. At says which of them holds now.
	Path    string `json:"path"`
	Private string `json:"private,omitempty"`
	At      string `json:"at,omitempty"`
	// Rule is the policy's word.
	Rule string `json:"rule"`
	// Request is kubelet's request without its secrets, to stage again when the
	// verdict changes. Incomplete is set where something was left out.
	Request    []byte `json:"request,omitempty"`
	Incomplete bool   `json:"incomplete,omitempty"`
}

func (r *volumeRecord) empty() bool { return r.Stage == nil && len(r.Plain) == 0 }

// records keeps one file a volume, below the state directory, written aside and
// renamed into place. Like the broker's they mean nothing after a reboot.
type records struct {
	dir  string
	boot string

	mu  sync.Mutex
	all map[volumeID]volumeRecord
}

func openRecords(dir string, log *zap.Logger) (*records, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, deferral.Errorf(diskKind(err), "the state directory cannot be made: %w", err)
	}
	r := &records{dir: dir, boot: boot, all: make(map[volumeID]volumeRecord)}
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, deferral.Errorf(deferral.Internal, "the state directory cannot be read: %w", err)
	}
	for _, name := range names {
		if err := r.load(name.Name()); err != nil {
			log.Error("a record of the front cannot be used and is left where it is", zap.String("file", name.Name()), zap.Error(err))
		}
	}
	r.dropGone(log)
	return r, nil
}

// bootID tells this boot from every other.
func bootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", deferral.Errorf(deferral.Internal, "the boot id cannot be read: %w", err)
	}
	return string(bytes.TrimSpace(raw)), nil
}

// load reads one file. What a kill left half-written, and what an earlier boot
// left, is removed.
func (r *records) load(name string) error {
	path := filepath.Join(r.dir, name)
	if !strings.HasSuffix(name, ".json") {
		return os.Remove(path)
	}
	rec, err := readRecord(path)
	if err != nil {
		return err
	}
	if rec.Boot != r.boot {
		return os.Remove(path)
	}
	r.all[volumeID{rec.Driver, rec.ID}] = rec
	return nil
}

// get gives a copy of a volume's record, an empty one where there is none.
func (r *records) get(id volumeID) volumeRecord {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec, ok := r.all[id]
	if !ok {
		return volumeRecord{Driver: id.driver, ID: id.id}
	}
	rec.Plain = append([]string(nil), rec.Plain...)
	return rec
}

// put writes a record, or removes it where nothing is left to remember. The
// caller has the volume's turn.
func (r *records) put(rec volumeRecord) error {
	rec.Version, rec.Boot = recordVersion, r.boot
	id := volumeID{rec.Driver, rec.ID}
	path := filepath.Join(r.dir, fileName(id))
	if rec.empty() {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return recordError(id, err)
		}
		r.mu.Lock()
		delete(r.all, id)
		r.mu.Unlock()
		return nil
	}
	raw, err := json.Marshal(rec)
	if err != nil {
		return recordError(id, err)
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return recordError(id, errors.Join(err, os.Remove(tmp)))
	}
	if err := os.Rename(tmp, path); err != nil {
		return recordError(id, errors.Join(err, os.Remove(tmp)))
	}
	r.mu.Lock()
	r.all[id] = rec
	r.mu.Unlock()
	return nil
}

func fileName(id volumeID) string { return privateName(id.driver, id.id, "") + ".json" }

func recordError(id volumeID, err error) error {
	return deferral.Errorf(diskKind(err), "volume %s of driver %s: its record cannot be written: %w",
		clip(id.id), id.driver, err)
}

// clip keeps a hostile value from filling a log, and control characters out.
func clip(s string) string {
	const most = 128
	if len(s) > most {
		s = s[:most] + "..."
	}
	for _, c := range s {
		if c < ' ' || c == 0x7f || c == 0xfffd {
			return "0x" + hex.EncodeToString([]byte(s))
		}
	}
	return s
}
