package decision

import (
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
)

// Explained is what becomes of a volume of a pod at its first publish, if no other pod has it.
type Explained struct {
	Volume, Outcome string
	Because         []string
}

func (e *Explained) String() string {
	return e.Volume + ": " + e.Outcome + "\n    " + strings.Join(e.Because, "\n    ") + "\n"
}

func (e *Explained) because(text string) { e.Because = append(e.Because, refusal.OneLine(text)) }

// Driver is what a driver reports. Elsewhere is set for one that is not behind the front. To one with MountGroup
// kubelet sends the pod's group, whatever the volume is.
type Driver struct{ Native, MultiWriter, MountGroup, Elsewhere bool }

// Explain decides for a volume of a pod as its publish would. Known is false where no cluster is asked.
func (r *Rules) Explain(pod *Pod, v *PodVolume, known bool, defaultFSType string, of Driver) Explained {
	e, verdict, err := Explained{Volume: v.Name, Outcome: "on the host"}, policy.Verdict{}, v.Unknown
	switch {
	case err != nil:
		err = refusal.WithParty(refusal.PartyPods, err)
	case v.Block:
		verdict.Rule = "its raw block volume"
	case of.Elsewhere:
		verdict.Rule = "its driver " + v.Driver + ", which is not behind crust-proxy"
	default:
		group := ""
		if of.MountGroup {
			group = pod.FSGroup
		}
		verdict, err = r.firstPublish(pod, v, known, v.request(defaultFSType, group, of.MultiWriter), of.Native)
	}
	for _, passed := range verdict.Passed {
		e.because("not " + passed)
	}
	if verdict.Rule != "" {
		e.because("by " + verdict.Rule)
	}
	switch {
	case err != nil:
		e.Outcome = "refused"
		e.because("(" + string(refusal.PartyOf(err)) + ") " + err.Error())
	case verdict.Defer:
		e.Outcome = "deferred to the handler " + verdict.Handler
	}
	return e
}

func (r *Rules) firstPublish(pod *Pod, v *PodVolume, known bool, req *VolumeRequest, native bool) (verdict policy.Verdict, err error) {
	var in *PodContext
	if known {
		if in, err = pod.ForVolume(v.Driver, v.VolumeID, ""); err != nil {
			return verdict, err
		}
	}
	if verdict, err = r.Publish(req, &State{}, in); err != nil || !verdict.Defer {
		return verdict, err
	}
	if req.Inline && !native {
		return verdict, InlineAsDevice(req, &verdict)
	}
	return verdict, CheckDeferrable(req, &verdict)
}

// request returns what decides of kubelet's publish of the volume.
func (v *PodVolume) request(defaultFSType, group string, multiWriter bool) *VolumeRequest {
	mode := csi.VolumeCapability_AccessMode_Mode_value[policy.ModeOf(v.AccessMode, multiWriter)]
	r, _ := PublishRequest(v.Driver, defaultFSType, "", &csi.NodePublishVolumeRequest{ // without fields of deferral there is no error
		VolumeId: v.VolumeID, TargetPath: v.Name, StagingTargetPath: v.Claim, VolumeContext: v.Context, Readonly: v.ReadOnly,
		VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.FSType, VolumeMountGroup: group}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)},
		},
	})
	r.Mark = v.Mark
	return r
}
