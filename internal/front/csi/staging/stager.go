// Package staging holds what the front records of CSI volumes, the private paths at which
// drivers are asked for devices, and the calls to drivers.
package staging

import (
	"context"
	"path"
	"path/filepath"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

// Store holds what is recorded of the volumes of all drivers.
type Store struct {
	Records *Records
	Private *PrivatePaths
	Marks   *Marks

	// requests holds in memory, by VolumeID, each *csi.NodeStageVolumeRequest whose record lacks
	// a part of it: the secrets, which no record may hold, or the whole request.
	requests sync.Map
	// withoutRawBlock has the names of drivers that mounted a filesystem where they were asked for a device.
	withoutRawBlock sync.Map
}

// OpenStore reads the records that an earlier process left in the state directory.
func OpenStore(stateDir, kubeletRoot, privateDir string, marks *Marks, log *zap.Logger) (*Store, error) {
	records, err := openRecords(filepath.Join(stateDir, RecordDir), log)
	if err != nil {
		return nil, err
	}
	return &Store{
		Records: records, Private: NewPrivatePaths(kubeletRoot, privateDir, records.privateDirs()...), Marks: marks,
	}, nil
}

// HoldsRequest reports whether a stage request with its secrets is in memory.
func (s *Store) HoldsRequest(id VolumeID) bool {
	_, held := s.requests.Load(id)
	return held
}

// ForgetRequest removes a volume's stage request from memory.
func (s *Store) ForgetRequest(id VolumeID) { s.requests.Delete(id) }

// Stager has one driver stage volumes, as kubelet asked or as devices, and records it. The
// caller of each method holds the volume's lock.
type Stager struct {
	driver *Driver
	store  *Store
	// couldDefer reports whether a staged volume may have to be staged anew for a pod. If
	// not, the stage request, which may hold credentials, is not needed again.
	couldDefer func(*csi.NodeStageVolumeRequest) bool
	log        *zap.Logger
}

// NewStager makes a stager for one driver.
func NewStager(driver *Driver, store *Store, couldDefer func(*csi.NodeStageVolumeRequest) bool, log *zap.Logger) *Stager {
	return &Stager{driver: driver, store: store, couldDefer: couldDefer, log: log}
}

// Stage has the driver stage the volume, as a device at a private path or, by forward, as kubelet asked. The record is
// written first and says that the stage is pending; only the driver's OK changes that. So after a kill or an uncertain
// error the next call stages again.
//
// The record holds the request only where the volume may have to be staged anew. A
// request that an earlier record holds stays until the driver has answered OK.
func (s *Stager) Stage(
	ctx context.Context, rec *Record, req *csi.NodeStageVolumeRequest, asDevice bool, rule string,
	forward func(context.Context) ([]byte, error),
) (reply []byte, err error) {
	before := rec.Stage
	rec.Stage = newStage(req, rule)
	rec.Stage.At, rec.Stage.Pending = stagedAt(asDevice), !before.Done(asDevice)
	keep := asDevice || s.couldDefer(req)
	if !keep && (before == nil || before.lacksRequest() || !rec.Stage.Pending) {
		rec.Stage.dropRequest()
	}
	if asDevice {
		rec.Stage.Private = s.store.Private.Staging(rec.VolumeID, req.GetStagingTargetPath())
		ask := proto.CloneOf(req)
		ask.StagingTargetPath, ask.VolumeCapability = rec.Stage.Private, AsBlock(req.GetVolumeCapability())
		forward = func(ctx context.Context) ([]byte, error) {
			_, err := s.driver.Node.NodeStageVolume(ctx, ask)
			return nil, err
		}
		if err := s.store.Private.MakeDir(rec.Stage.Private); err != nil {
			return nil, s.notAsked(rec, before, err)
		}
	}
	s.cacheRequest(rec.VolumeID, req, rec.Stage)
	if err := s.put(rec, asDevice); err != nil {
		return nil, s.notAsked(rec, before, err)
	}
	failpoint.Hit("front-stage-recorded")
	reply, err = forward(ctx)
	failpoint.Hit("front-stage-driver")
	if err != nil {
		if asDevice {
			err = s.driver.BlockError("stage", rule, err, SecretsOf(req))
		}
		return reply, s.failed(ctx, rec, before, err)
	}
	if asDevice {
		if st, mounted := MountAt(rec.Stage.Private); mounted && isDirectory(&st) {
			return nil, s.undoFilesystem(ctx, rec, before, s.foundFilesystem(rec.Stage.Private, rule, &st))
		}
	}
	return reply, s.succeeded(rec, asDevice, keep)
}

// notAsked is the error of a stage for which the driver was not asked. The volume stays as an
// earlier call left it, which may be staged.
func (s *Stager) notAsked(rec *Record, before *StageRecord, cause error) error {
	private := rec.Stage.Private
	rec.Stage = before
	if before != nil && before.At != NotStaged {
		return refusal.NotFinal(refusal.Clip(rec.ID), cause)
	}
	return refusal.JoinUndo(refusal.Clip(rec.ID), cause, s.store.Private.removeStaging(private))
}

// cacheRequest stores in memory what a record lacks of its request, for as long as it may
// be needed. A pending stage needs it, whatever the policy says.
func (s *Stager) cacheRequest(id VolumeID, req *csi.NodeStageVolumeRequest, stage *StageRecord) {
	if stage.Incomplete && (stage.Pending || !stage.lacksRequest()) {
		s.store.requests.Store(id, req)
	} else {
		s.store.ForgetRequest(id)
	}
}

// put records a stage. A full run directory does not keep a volume that is not deferred from its pod.
func (s *Stager) put(rec *Record, asDevice bool) error {
	if !asDevice {
		s.RecordOnHost(rec)
		return nil
	}
	return s.store.Records.Put(*rec)
}

// succeeded records that the driver has staged the volume, and drops the request unless it is to be kept.
func (s *Stager) succeeded(rec *Record, asDevice, keep bool) error {
	if !rec.Stage.Pending {
		return nil // it was staged in this way before
	}
	stage := *rec.Stage
	stage.Pending = false
	if !keep {
		stage.dropRequest()
		s.store.ForgetRequest(rec.VolumeID)
	}
	rec.Stage = &stage
	if err := s.put(rec, asDevice); err != nil {
		return refusal.NotFinal(refusal.Clip(rec.ID), err)
	}
	failpoint.Hit("front-stage-placed")
	return nil
}

// failed removes the record of a stage that the driver refused with a final code. After
// any other error the driver may have staged the volume, and the record stays.
func (s *Stager) failed(ctx context.Context, rec *Record, before *StageRecord, cause error) error {
	switch {
	case !refusal.IsFinal(cause):
		return cause
	case before == nil || before.At == NotStaged:
		private := rec.Stage.Private
		rec.Stage = before
		if err := s.store.Records.Put(*rec); err != nil {
			return refusal.JoinUndo(refusal.Clip(rec.ID), cause, err)
		}
		if private != "" {
			return refusal.JoinUndo(refusal.Clip(rec.ID), cause, s.store.Private.removeStaging(private))
		}
		return cause
	case before.Pending: // an earlier request may have staged it
		ctx, cancel := UndoContext(ctx)
		defer cancel()
		return refusal.JoinUndo(refusal.Clip(rec.ID), cause, s.Unstage(ctx, rec))
	case rec.Stage.At == StagedAsDevice:
		return refusal.NotFinal(refusal.Clip(rec.ID), cause)
	default:
		return cause
	}
}

// Unstage has the driver unstage what it staged, in whichever way. The record stays, because
// kubelet regards the volume as staged.
func (s *Stager) Unstage(ctx context.Context, rec *Record) error {
	stage := *rec.Stage
	where, unstage := stage.Path, s.driver.Unstage
	if stage.At == StagedAsDevice {
		where, unstage = stage.Private, s.unstagePrivate
	}
	if !stage.Pending {
		// If the driver's answer is lost, the volume may be unstaged: a later publish stages it again.
		pending := stage
		pending.Pending = true
		rec.Stage = &pending
		s.RecordOnHost(rec)
	}
	failpoint.Hit("front-unplacing")
	if err := unstage(ctx, rec.ID, where); err != nil {
		return err
	}
	stage.At, stage.Pending = NotStaged, false
	rec.Stage = &stage
	if err := s.store.Records.Put(*rec); err != nil {
		return err
	}
	failpoint.Hit("front-unplaced")
	if stage.Private != "" {
		return s.store.Private.removeStaging(stage.Private)
	}
	return nil
}

// Restage stages a volume that no pod has in the other way, or finishes a stage that was
// interrupted: kubelet does not stage again by itself.
func (s *Stager) Restage(ctx context.Context, rec *Record, asDevice bool, rule string) error {
	if rec.Stage.Done(asDevice) {
		return nil
	}
	req, err := s.storedRequest(rec)
	if err != nil {
		return err
	}
	if rec.Stage.StagedOtherwise(asDevice) {
		if err := s.Unstage(ctx, rec); err != nil {
			return err
		}
	}
	_, err = s.Stage(ctx, rec, req, asDevice, rule, func(ctx context.Context) ([]byte, error) {
		_, err := s.driver.Node.NodeStageVolume(ctx, req)
		return nil, s.driver.Error("asked to stage the volume", err, SecretsOf(req))
	})
	return err
}

// storedRequest is kubelet's stage request, from memory or from the record.
func (s *Stager) storedRequest(rec *Record) (*csi.NodeStageVolumeRequest, error) {
	held, _ := s.store.requests.Load(rec.VolumeID)
	if req, ok := held.(*csi.NodeStageVolumeRequest); ok {
		return req, nil
	}
	if rec.Stage.lacksRequest() {
		return nil, requestNotKept(rec)
	}
	if rec.Stage.Incomplete {
		return nil, secretsLost(rec)
	}
	req := &csi.NodeStageVolumeRequest{}
	if err := proto.Unmarshal(rec.Stage.Request, req); err != nil {
		return nil, storedRequestUnreadable(rec, err)
	}
	return req, nil
}

// StagedDevice reports whether a driver was asked to stage a device at the private path of
// kubelet's staging path, and has not unstaged it since. It works without a record.
func (s *Stager) StagedDevice(id VolumeID, stagingPath string) (bool, error) {
	return s.store.Private.Exists(s.store.Private.Staging(id, stagingPath))
}

// UnstageDevice has the driver unstage a device at the private path of kubelet's staging path, if one was ever asked
// for there, and reports whether one was. It works without a record.
func (s *Stager) UnstageDevice(ctx context.Context, id VolumeID, stagingPath string) (was bool, err error) {
	private := s.store.Private.Staging(id, stagingPath)
	if was, err = s.store.Private.Exists(private); err != nil || !was {
		return false, err
	}
	if err := s.unstagePrivate(ctx, id.ID, private); err != nil {
		return true, err
	}
	return true, s.store.Private.removeStaging(private)
}

// UnpublishDevice has the driver unpublish a device at a private path, if one was ever asked for there.
func (s *Stager) UnpublishDevice(ctx context.Context, volumeID, device string) error {
	if there, err := s.store.Private.Exists(path.Dir(device)); err != nil || !there {
		return err
	}
	if err := s.driver.unpublishLayers(ctx, volumeID, device); err != nil {
		return err
	}
	failpoint.Hit("front-unpublish-private")
	return s.store.Private.RemovePublish(device)
}

// RecordOnHost writes the record of a volume that is not deferred, or is being unpublished.
// Where a full run directory prevents that, the record is in memory until the next
// restart: the claim in the kernel still keeps a second owner from the device.
func (s *Stager) RecordOnHost(rec *Record) {
	if err := s.store.Records.Put(*rec); err != nil {
		s.LogRecordFailure(err)
		s.store.Records.putInMemory(*rec)
	}
}

// LogRecordFailure logs that a record could not be written, where the call goes on.
func (s *Stager) LogRecordFailure(err error) {
	s.log.Error("a record of the front cannot be written", zap.Error(err))
}
