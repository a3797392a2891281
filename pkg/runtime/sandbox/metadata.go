package sandbox

import (
	"encoding/json"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"go.uber.org/zap"
)

// metadataExtension is where containerd's CRI plugin keeps what it knows of a
// sandbox, with its container: JSON, the same in 1.6, 1.7 and 2.x.
const (
	metadataExtension = "io.cri-containerd.sandbox.metadata"
	metadataVersion   = "v1"
	maxMetadata       = 1 << 20
)

// podMetadata is the part of it that matters. The rest holds the pod's
// annotations, which are nobody's business and in no log.
type podMetadata struct {
	Version  string
	Metadata struct {
		RuntimeHandler *string
	}
}

// sandboxOf reads a sandbox from its container. Whatever does not look like one
// of CRI's is none.
func (t *Tracker) sandboxOf(c *containersapi.Container) (sandbox, bool) {
	if c.GetLabels()[kindLabel] != kindSandbox {
		return sandbox{}, false
	}
	s := sandbox{
		id: c.GetID(), pod: c.GetLabels()[podLabel], runtime: clip(c.GetRuntime().GetName()), created: c.GetCreatedAt().AsTime(),
	}
	if !t.good(s) {
		return sandbox{}, false
	}
	s.handler = t.handlerOf(c)
	return s, true
}

// handlerOf reads the runtime handler from a sandbox's container; nil is for
// not told.
func (t *Tracker) handlerOf(c *containersapi.Container) *string {
	extension, there := c.GetExtensions()[metadataExtension]
	if !there {
		return nil
	}
	raw := extension.GetValue()
	var m podMetadata
	if len(raw) > maxMetadata || json.Unmarshal(raw, &m) != nil || m.Version != metadataVersion || m.Metadata.RuntimeHandler == nil {
		t.log.Warn("a sandbox's runtime handler cannot be read", zap.String("id", c.GetID()), zap.Int("bytes", len(raw)))
		return nil
	}
	return t.goodHandler(c.GetID(), *m.Metadata.RuntimeHandler)
}
