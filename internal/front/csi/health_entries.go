package csi

import (
	"cmp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

type healthEntry = csi.VolumeHealth_VolumeHealthEntry

// What the Kubernetes API accepts of one volume in the status of a pod. Because of a single entry that breaks a
// rule it refuses the whole status, and the pod can never end. kubelet does not check.
const (
	maxHealthEntries = 16
	maxHealthReason  = 256
	maxHealthMessage = 1024
)

var notInReason = sys.LazyRegexp(`[^A-Za-z0-9_,:]`)

func healthReply(id string, entries []*healthEntry) ([]byte, error) {
	health := &csi.VolumeHealth{VolumeId: id, HealthStatuses: acceptable(entries)}
	return proto.Marshal(&csi.NodeGetVolumeHealthResponse{VolumeHealth: health})
}

// acceptable returns entries as the Kubernetes API accepts them: one per status and reason, which has the messages of
// all, and of too many the worst. kubelet ignores a status that it does not know, as CSI wants, so it is kept.
func acceptable(entries []*healthEntry) (out []*healthEntry) {
	first := make(map[string]*healthEntry)
	for _, entry := range entries {
		entry = acceptableEntry(entry)
		is := entry.GetStatus().String() + " " + entry.GetReason()
		if same := first[is]; same == nil {
			first[is] = entry
			out = append(out, entry)
		} else if !strings.Contains(same.GetMessage(), entry.GetMessage()) {
			same.Message = clipMessage(strings.TrimPrefix(same.GetMessage()+"; "+entry.GetMessage(), "; "))
		}
	}
	if len(out) > maxHealthEntries {
		slices.SortStableFunc(out, func(a, b *healthEntry) int { return cmp.Compare(severity(b), severity(a)) })
		out = out[:maxHealthEntries]
	}
	return out
}

// acceptableEntry changes what is wrong in a reason, and then repeats it in the message.
func acceptableEntry(entry *healthEntry) *healthEntry {
	out, said := proto.CloneOf(entry), entry.GetReason()
	clean := strings.TrimLeft(notInReason().ReplaceAllString(said, "_"), "0123456789_,:")
	clean = strings.TrimRight(clean[:min(len(clean), maxHealthReason)], ",:")
	if clean != said {
		out.Message = strings.TrimSuffix(sys.Clip(said)+": "+entry.GetMessage(), ": ")
	}
	out.Reason, out.Message = cmp.Or(clean, reasonAbnormal), clipMessage(out.GetMessage())
	return out
}

func clipMessage(message string) string {
	return sys.ClipTo(strings.ToValidUTF8(message, "?"), maxHealthMessage-len("..."))
}

// severity is the status, if it is known: CSI numbers them from the mildest to the worst.
func severity(entry *healthEntry) csi.VolumeHealthErrorType {
	if entry.GetStatus() > csi.VolumeHealthErrorType_DATA_LOSS {
		return csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE
	}
	return entry.GetStatus()
}
