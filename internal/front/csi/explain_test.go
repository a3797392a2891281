package csi

import (
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// explainedPods are pods of all kinds, each with the volume of the tests.
func explainedPods() (all []decision.Pod) {
	for _, handler := range []string{"", "kata", "crust"} {
		for _, asks := range []string{"", "data", "data,nothing"} {
			for _, group := range []string{"", "7"} {
				for i, namespace := range []string{"shop", "lab"} {
					for _, v := range []decision.PodVolume{
						{}, {SubPaths: []string{"logs"}}, {StorageClass: "slow"}, {AccessMode: "ReadWriteMany"},
						{NoGroup: true}, {Context: map[string]string{policy.ContextKey: []string{"true", "false"}[i]}}, {Context: map[string]string{policy.ContextKey: "?"}},
					} {
						v.Claim, v.FSType = "data", "ext4"
						all = append(all, decision.Pod{UID: "p1", Namespace: namespace, Name: "db-0", RuntimeHandler: handler, Asks: asks, FSGroup: group, Volumes: one(v)})
					}
				}
			}
		}
	}
	return all
}

// TestExplanationsAreTrue compares what is explained of each pod with what the front then does, for several policies, and with
// and without a cluster.
func TestExplanationsAreTrue(t *testing.T) {
	policies := []*policy.Policy{
		{Rules: []policy.Rule{
			{Name: "lab", Namespaces: []string{"lab"}, StorageClasses: []string{"slow"}, Defer: true, Handler: "crust"},
			{Name: "sub-paths", RuntimeHandlers: []string{"kata"}, Needs: []string{policy.NeedSubPath}},
			{Name: "asked", RuntimeHandlers: []string{"crust"}, Annotated: true, Defer: true, Handler: "crust"},
			{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true, Handler: "kata"},
		}},
		{Rules: []policy.Rule{
			{Name: "groups", Needs: []string{policy.NeedFSGroup}}, {Name: "slow", StorageClasses: []string{"slow"}, Annotated: true}, {Name: "all", Defer: true},
		}},
		{},
	}
	seen := make(map[string]int)
	for n, p := range policies {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprint(n, known), func(t *testing.T) {
				r := newRig(t, p)
				r.cfg.DefaultHandler, r.broker.abilities = "kata", deferral.Abilities{}
				pods := make(fakePods)
				if known {
					r.cfg.Pods = pods
				}
				r.restart()
				for i, pod := range explainedPods() {
					pods["p1"] = pod
					driver, group := decision.Driver{MountGroup: i%2 == 0}, ""
					if driver.MountGroup {
						group = pod.FSGroup
					}
					if i%5 == 0 {
						check.Must(t, r.front.store.Marks.Put(&decision.Mark{Driver: driverName, VolumeID: "vol-1", Rule: "old", Handler: "kata"}))
					}
					pod.Volumes[0].Mark = r.front.Mark(driverName, "vol-1")
					e := r.front.rules.Load().Explain(&pod, &pod.Volumes[0], known, "ext4", driver)
					got := r.outcome(&pod.Volumes[0], group)
					check.Require(t, strings.HasPrefix(e.Outcome, got.outcome) && strings.HasSuffix(e.Because[len(e.Because)-1], got.because),
						"%+v: explained as\n%s, and it was %+v", pod, e.String(), got)
					seen[strings.Fields(e.Outcome)[0]]++
				}
			})
		}
	}
	check.That(t, len(seen) == 3 && seen["deferred"] >= 50 && seen["on"] >= 50 && seen["refused"] >= 50, "too few of a kind: %v", seen)
}

type outcome struct{ outcome, because string }

// outcome stages and publishes the volume of a pod, and undoes that.
func (r *rig) outcome(v *decision.PodVolume, group string) outcome {
	r.t.Helper()
	mode := csi.VolumeCapability_AccessMode_Mode(csi.VolumeCapability_AccessMode_Mode_value[policy.ModeOf(v.AccessMode, false)])
	stage, publish := r.stageReq(), r.publishReq("p1")
	publish.VolumeContext = map[string]string{decision.PodUIDKey: "p1"}
	for key, value := range v.Context {
		publish.VolumeContext[key] = value
	}
	stage.VolumeCapability, publish.VolumeCapability, stage.VolumeContext = mountCap(mode, v.FSType), mountCap(mode, v.FSType), publish.VolumeContext
	stage.GetVolumeCapability().GetMount().VolumeMountGroup, publish.GetVolumeCapability().GetMount().VolumeMountGroup = group, group
	err := r.tryStage(stage)
	if err == nil {
		err = r.tryPublish(publish)
	}
	if err != nil {
		_, _ = r.unpublish("p1"), r.tryUnstage()
		r.ok(nil, r.front.store.Marks.Remove(staging.VolumeID{Driver: driverName, ID: "vol-1"}))
		_, text, _ := strings.Cut(status.Convert(err).Message(), ": ")
		return outcome{"refused", text}
	}
	got := outcome{outcome: "on the host"}
	for _, status := range r.broker.OfOrigin(driverName, "vol-1") {
		got = outcome{"deferred to the handler " + status.Handler, "by " + status.Origin.Rule}
	}
	r.end("p1")
	r.ok(nil, r.front.store.Marks.Remove(staging.VolumeID{Driver: driverName, ID: "vol-1"}))
	return got
}
