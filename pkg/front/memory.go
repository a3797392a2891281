package front

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
)

// Where a volume is staged.
const (
	// notStaged: the driver unstaged it, and kubelet believes it staged.
	notStaged = ""
	// stagedAtPath: where kubelet asked for.
	stagedAtPath = "path"
	// stagedPrivately: as a device, at the private path.
	stagedPrivately = "private"
)

func stagedAt(block bool) string {
	if block {
		return stagedPrivately
	}
	return stagedAtPath
}

// stageMemory keeps whole stage requests that hold secrets, which no record may.
type stageMemory struct {
	mu  sync.Mutex
	all map[volumeID]*csi.NodeStageVolumeRequest
}

// remember keeps a request where the record of it would be incomplete.
func (m *stageMemory) remember(id volumeID, req *csi.NodeStageVolumeRequest) {
	if _, incomplete := withoutSecrets(req); !incomplete {
		m.forget(id)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		m.all = make(map[volumeID]*csi.NodeStageVolumeRequest)
	}
	m.all[id] = req
}

func (m *stageMemory) get(id volumeID) *csi.NodeStageVolumeRequest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[id]
}

func (m *stageMemory) forget(id volumeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, id)
}

// newStage makes the record of a stage.
func newStage(req *csi.NodeStageVolumeRequest, rule string) *stageRecord {
	stage := &stageRecord{Path: req.GetStagingTargetPath(), Rule: rule}
	clean, incomplete := withoutSecrets(req)
	raw, err := proto.Marshal(clean)
	stage.Request, stage.Incomplete = raw, incomplete || err != nil
	return stage
}

// withoutSecrets is the request as it may be written down, and whether something
// is missing of it. Service account tokens come in the volume context.
func withoutSecrets(req *csi.NodeStageVolumeRequest) (clean *csi.NodeStageVolumeRequest, incomplete bool) {
	clean = &csi.NodeStageVolumeRequest{
		VolumeId: req.GetVolumeId(), StagingTargetPath: req.GetStagingTargetPath(),
		VolumeCapability: req.GetVolumeCapability(),
		PublishContext:   plainValues(req.GetPublishContext()), VolumeContext: plainValues(req.GetVolumeContext()),
	}
	incomplete = len(req.GetSecrets()) > 0 || len(clean.GetPublishContext()) != len(req.GetPublishContext()) ||
		len(clean.GetVolumeContext()) != len(req.GetVolumeContext()) ||
		slices.ContainsFunc(clean.GetVolumeCapability().GetMount().GetMountFlags(), secretName)
	if incomplete {
		clean.VolumeCapability = nil
	}
	return clean, incomplete || len(req.ProtoReflect().GetUnknown()) > 0
}

func plainValues(all map[string]string) map[string]string {
	kept := maps.Clone(all)
	maps.DeleteFunc(kept, func(key, _ string) bool { return secretName(key) })
	return kept
}

// secretName errs on the side of caution: a value that is left out costs a clear
// error after a restart, one that is kept may be somebody's password.
func secretName(key string) bool {
	key = strings.ToLower(strings.NewReplacer("-", "", "_", "", ".", "").Replace(key))
	for _, part := range []string{"pass", "secret", "token", "cred", "key", "auth", "chap"} {
		if strings.Contains(key, part) {
			return true
		}
	}
	return false
}
