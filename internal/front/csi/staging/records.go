package staging

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// RecordDir holds the records, below the state directory.
const RecordDir = "csi"

// recordVersion is the form of the records written.
const recordVersion = 1

// maxRecord has room for the longest request, of 16 MiB, in base64, and for the targets.
const maxRecord = 32 << 20

// Record holds what the broker does not record of a CSI volume: how the driver was asked
// to stage it, and which pods have it without deferral. It holds no secret.
type Record struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
	VolumeID
	// Stage is nil where the volume is not staged.
	Stage *StageRecord `json:"stage,omitempty"`
	// OnHost are the targets that the driver itself has mounted.
	OnHost []string `json:"plain,omitempty"`
	// Uncertain are the targets at which a driver was asked to publish deferred, where it
	// is not known whether it did; and where it did, from the unpublish on.
	Uncertain []string `json:"asked,omitempty"`
	// Raw are the targets of raw block volumes; true is for one that is only read.
	Raw map[string]bool `json:"raw,omitempty"`
}

// StageRecord is a stage that kubelet asked for.
type StageRecord struct {
	// Path is kubelet's staging path, and Private where the driver stages a device instead. At names the one in use.
	// While Pending is set, the driver has been asked to stage there, and has not answered OK.
	Path    string `json:"path"`
	Private string `json:"private,omitempty"`
	At      string `json:"at,omitempty"`
	Pending bool   `json:"placing,omitempty"`
	// Rule names what decided, as in policy.Verdict.
	Rule string `json:"rule"`
	// Request is kubelet's request without its secrets, to stage again when the verdict changes. It is empty where the
	// volume could not be deferred for any pod. Incomplete is set where something was left out.
	Request    []byte `json:"request,omitempty"`
	Incomplete bool   `json:"incomplete,omitempty"`
}

// How a volume is staged.
const (
	// NotStaged: the driver has unstaged it, but kubelet regards it as staged.
	NotStaged = ""
	// StagedOnHost: as a filesystem, at kubelet's staging path.
	StagedOnHost = "path"
	// StagedAsDevice: as a block device, at the private path.
	StagedAsDevice = "private"
)

func stagedAt(asDevice bool) string {
	if asDevice {
		return StagedAsDevice
	}
	return StagedOnHost
}

// Done reports whether the driver has staged the volume in this way.
func (s *StageRecord) Done(asDevice bool) bool {
	return s != nil && s.At == stagedAt(asDevice) && !s.Pending
}

// StagedOtherwise reports whether the driver has, or may have, staged the volume in the other way.
func (s *StageRecord) StagedOtherwise(asDevice bool) bool {
	return s.At != NotStaged && s.At != stagedAt(asDevice)
}

// AssumeStaged corrects the record of a volume that a pod has: the driver has staged it in
// this way, although the record was lost or says that the stage is pending. A repeated stage
// that fails must not have the driver unstage the device under the pod.
func (r *Record) AssumeStaged(path string, asDevice bool) {
	if r.Stage == nil || r.Stage.At == stagedAt(asDevice) && r.Stage.Pending {
		r.Stage = &StageRecord{Path: path, At: stagedAt(asDevice)}
	}
}

// newStage is the record of a request, without its secrets. Service account tokens come in the volume context.
func newStage(req *csi.NodeStageVolumeRequest, rule string) *StageRecord {
	clean := &csi.NodeStageVolumeRequest{
		VolumeId: req.GetVolumeId(), StagingTargetPath: req.GetStagingTargetPath(), VolumeCapability: req.GetVolumeCapability(),
		PublishContext: plainValues(req.GetPublishContext()), VolumeContext: plainValues(req.GetVolumeContext()),
	}
	incomplete := len(req.GetSecrets()) > 0 || len(clean.GetPublishContext()) != len(req.GetPublishContext()) ||
		len(clean.GetVolumeContext()) != len(req.GetVolumeContext()) ||
		slices.ContainsFunc(clean.GetVolumeCapability().GetMount().GetMountFlags(), secretName)
	if incomplete {
		clean.VolumeCapability = nil
	}
	raw, err := proto.Marshal(clean)
	return &StageRecord{
		Path: req.GetStagingTargetPath(), Rule: rule, Request: raw, Incomplete: incomplete || err != nil || len(req.ProtoReflect().GetUnknown()) > 0,
	}
}

// dropRequest removes the request from the record. Then only kubelet can have the volume staged again.
func (s *StageRecord) dropRequest() { s.Request, s.Incomplete = nil, true }

func (s *StageRecord) lacksRequest() bool { return len(s.Request) == 0 }

func (r *Record) empty() bool {
	return r.Stage == nil && len(r.OnHost) == 0 && len(r.Uncertain) == 0 && len(r.Raw) == 0
}

// Without is a list of targets without one of them.
func Without(targets []string, target string) []string {
	return slices.DeleteFunc(slices.Clone(targets), func(t string) bool { return t == target })
}

// VolumeID names a CSI volume on this node.
type VolumeID struct {
	Driver string `json:"driver"`
	ID     string `json:"volumeID"`
}

// Records keeps one file per volume below the state directory, written atomically. Like the
// broker's records they mean nothing after a reboot.
type Records struct {
	dir  string
	boot string

	mu  sync.Mutex
	all map[VolumeID]Record
}

func openRecords(dir string, log *zap.Logger) (*Records, error) {
	boot, err := sys.BootID()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, stateDirError(volume.DiskKind(err), "made", err)
	}
	r := &Records{dir: dir, boot: boot, all: make(map[VolumeID]Record)}
	err = readRecords(dir, func(path string, rec Record, err error) {
		switch {
		case errors.Is(err, errHalfWritten), err == nil && rec.Boot != boot: // by a kill, or before a reboot
			err = os.Remove(path)
		case err == nil:
			r.all[rec.VolumeID] = rec
		}
		if err != nil {
			log.Error("a record of the front cannot be used and is left where it is", zap.String("file", filepath.Base(path)), zap.Error(err))
		}
	})
	if err != nil {
		return nil, stateDirError(volume.Internal, "read", err)
	}
	r.dropGone(log)
	return r, nil
}

// Get returns a copy of a volume's record, an empty one where there is none.
func (r *Records) Get(id VolumeID) Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec, ok := r.all[id]
	if !ok {
		return Record{VolumeID: id}
	}
	rec.OnHost, rec.Uncertain, rec.Raw = slices.Clone(rec.OnHost), slices.Clone(rec.Uncertain), maps.Clone(rec.Raw)
	return rec
}

// Put writes a record, or removes it where it is empty. The caller holds the volume's lock.
func (r *Records) Put(rec Record) error {
	rec.Version, rec.Boot = recordVersion, r.boot
	path := filepath.Join(r.dir, FileName(rec.VolumeID))
	raw, err := sys.EncodeJSON(rec, maxRecord)
	switch {
	case rec.empty():
		err = sys.UnlessMissing(os.Remove(path))
	case err == nil:
		err = sys.WriteSynced(path, raw)
	}
	if err != nil {
		return recordError(rec.VolumeID, err)
	}
	r.putInMemory(rec)
	return nil
}

// putInMemory stores a record in memory only, until the next restart. A full run directory
// must not keep a volume that is not deferred from its pod, nor the pod from ending.
func (r *Records) putInMemory(rec Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rec.empty() {
		delete(r.all, rec.VolumeID)
		return
	}
	rec.Raw = maps.Clone(rec.Raw) // the caller may change his own
	r.all[rec.VolumeID] = rec
}

// FileName is the name of a volume's record.
func FileName(id VolumeID) string { return fmt.Sprintf("%x.json", hashOf(id, "")) }

// Staged is a CSI volume whose driver has staged a device at a private path: only the front can have it unstaged.
type Staged struct{ Driver, VolumeID, Path string }

// StagedDevices reads the staged devices from a state directory and changes nothing: the
// daemon may be running or not. With an error the list is incomplete.
func StagedDevices(stateDir string) ([]Staged, error) {
	boot, err := sys.BootID()
	if err != nil {
		return nil, err
	}
	var out []Staged
	var problems []error
	err = readRecords(filepath.Join(stateDir, RecordDir), func(path string, rec Record, err error) {
		switch {
		case errors.Is(err, errHalfWritten), errors.Is(err, fs.ErrNotExist): // it went meanwhile
		case err != nil:
			problems = append(problems, fmt.Errorf("the front's record %s cannot be read: %w", path, err))
		case rec.Boot == boot && rec.StagedAsDevice():
			out = append(out, rec.staged())
		}
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		problems = append(problems, fmt.Errorf("the front's records cannot be read: %w", err))
	}
	return out, errors.Join(problems...)
}

// privateDirs lists the directories of private paths at which volumes are staged.
func (r *Records) privateDirs() []string {
	dirs := make(map[string]bool)
	for _, rec := range r.all {
		if rec.Stage != nil && rec.Stage.Private != "" {
			dirs[path.Dir(path.Dir(rec.Stage.Private))] = true
		}
	}
	return slices.Sorted(maps.Keys(dirs))
}

// StagedDevices returns the staged devices of the running daemon.
func (r *Records) StagedDevices() []Staged {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Staged
	for _, rec := range r.all {
		if rec.StagedAsDevice() {
			out = append(out, rec.staged())
		}
	}
	return out
}

// StagedAsDevice reports whether the driver has staged, or was asked to stage, a device.
func (r *Record) StagedAsDevice() bool { return r.Stage != nil && r.Stage.At == StagedAsDevice }

func (r *Record) staged() Staged { return Staged{Driver: r.Driver, VolumeID: r.ID, Path: r.Stage.Path} }

var errHalfWritten = errors.New("it was not written to its end")

// readRecords calls each for every file of a directory of records.
func readRecords(dir string, each func(path string, rec Record, err error)) error {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		rec, err := readRecord(path)
		each(path, rec, err)
	}
	return err
}

func readRecord(path string) (rec Record, err error) {
	if !strings.HasSuffix(path, ".json") {
		return rec, errHalfWritten
	}
	raw, err := sys.ReadSmall(path, maxRecord)
	if err == nil {
		err = json.Unmarshal(raw, &rec)
	}
	if err == nil && rec.Version != recordVersion {
		err = fmt.Errorf("it is of version %d", rec.Version)
	}
	return rec, err
}

// dropGone removes the targets that were unpublished while the daemon did not run: they would
// keep their volume from being deferred. kubelet makes the directory around a target before a
// publish, and removes it last. The target itself is not touched: the server of a mount may have gone.
func (r *Records) dropGone(log *zap.Logger) {
	for _, rec := range r.all {
		gone := func(target string) bool {
			_, err := os.Lstat(filepath.Dir(target))
			return errors.Is(err, fs.ErrNotExist)
		}
		if !slices.ContainsFunc(slices.Concat(rec.OnHost, rec.Uncertain, slices.Collect(maps.Keys(rec.Raw))), gone) {
			continue
		}
		rec.Raw = maps.Clone(rec.Raw)
		maps.DeleteFunc(rec.Raw, func(target string, _ bool) bool { return gone(target) })
		rec.OnHost, rec.Uncertain = slices.DeleteFunc(slices.Clone(rec.OnHost), gone), slices.DeleteFunc(slices.Clone(rec.Uncertain), gone)
		if err := r.Put(rec); err != nil {
			log.Warn("a record of the front is not up to date", zap.Error(err))
		}
	}
}
