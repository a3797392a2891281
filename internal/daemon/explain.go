package daemon

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/crust"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// explainer decides as the front does.
func explainer(cfg *config.Config) *decision.Rules {
	return &decision.Rules{Policy: cfg.DeferralPolicy(), DefaultHandler: cfg.Handlers.Default, Abilities: func(handler string) (can deferral.Abilities) {
		if handler == crust.Name {
			can = new(crust.Handler).Abilities()
		}
		return can // Kata's have none
	}}
}

// explainFile explains the pod of a file, for drivers that report SINGLE_NODE_MULTI_WRITER and for others.
func explainFile(cfg *config.Config, file string) (text string, err error) {
	raw, err := os.ReadFile(file) // #nosec G304 -- the operator names it
	if err != nil {
		return "", err
	}
	pod, err := pods.Read(raw)
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	rules, known := explainer(cfg), cfg.Cluster.On()
	for i := range pod.Volumes {
		usual := rules.Explain(&pod, &pod.Volumes[i], known, cfg.Front.DefaultFSType, decision.Driver{})
		multi := rules.Explain(&pod, &pod.Volumes[i], known, cfg.Front.DefaultFSType, decision.Driver{MultiWriter: true})
		if text += usual.String(); multi.Outcome != usual.Outcome {
			text += "with a driver that reports SINGLE_NODE_MULTI_WRITER, " + multi.String()
		}
	}
	return text, nil
}

func (f *driverFront) explain(ctx context.Context, cfg *config.Config, name string) (out []*adminv1.ExplainedVolume, err error) {
	pod, err := f.cluster.ByName(ctx, name)
	drivers := shown(f.drivers.List())
	ready := slices.DeleteFunc(slices.Clone(drivers), func(one *adminv1.Driver) bool { return !one.GetReady() })
	drivers = append(ready, drivers...) // of two registrars, the one that serves the driver
	for i := range pod.Volumes {
		of := decision.Driver{Elsewhere: true}
		if n := slices.IndexFunc(drivers, func(one *adminv1.Driver) bool { return one.GetName() == pod.Volumes[i].Driver }); n >= 0 {
			reports := func(capability string) bool { return slices.Contains(drivers[n].GetCapabilities(), capability) }
			of = decision.Driver{
				Native: drivers[n].GetMode() == volume.WayNative, MultiWriter: reports("SINGLE_NODE_MULTI_WRITER"), MountGroup: reports("VOLUME_MOUNT_GROUP"),
			}
		}
		pod.Volumes[i].Mark = f.front.Mark(pod.Volumes[i].Driver, pod.Volumes[i].VolumeID)
		e := explainer(cfg).Explain(&pod, &pod.Volumes[i], true, cfg.Front.DefaultFSType, of)
		out = append(out, &adminv1.ExplainedVolume{Volume: e.Volume, Outcome: e.Outcome, Because: e.Because})
	}
	return out, err
}
