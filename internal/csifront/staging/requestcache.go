package staging

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// requestCache holds stage requests in memory while their records lack a part of them: the
// secrets, which no record may hold, or the whole request.
type requestCache struct {
	mu  sync.Mutex
	all map[VolumeID]*csi.NodeStageVolumeRequest
}

// put replaces the request of a volume.
func (c *requestCache) put(id VolumeID, req *csi.NodeStageVolumeRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all == nil {
		c.all = make(map[VolumeID]*csi.NodeStageVolumeRequest)
	}
	c.all[id] = req
}

func (c *requestCache) get(id VolumeID) *csi.NodeStageVolumeRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all[id]
}

func (c *requestCache) forget(id VolumeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.all, id)
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
