package conformance

import (
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// runRefuse publishes volumes that no container may get.
func runRefuse(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	for _, one := range []struct {
		name   string
		change func(*abi.Info)
	}{
		{"refuse-pod", func(info *abi.Info) { info.Metadata["crust.podUID"] = "00000000-0000-4000-8000-000000000000" }},
		{"refuse-device", func(info *abi.Info) { info.Metadata["crust.device"] = "1:1" }},
		{"refuse-target", func(info *abi.Info) { info.Metadata["crust.targetPath"] += "-other" }},
		{"refuse-type", func(info *abi.Info) { info.VolumeType = "a-later-type" }},
	} {
		f.vol.publishOdd(t, one.change)
		s.check(t, one.name, f.refuses)
	}
	s.check(t, "refuse-option", func(t *trial) {
		for _, option := range []string{"no-such-option=1", "bind", "loop"} {
			f.vol.publishOdd(t, func(info *abi.Info) { info.Options = []string{option} })
			if err := try(t.ctx, f.refuses); err != nil {
				t.must(fmt.Errorf("the option %q: %w", option, err))
			}
		}
	})
	t.must(f.vol.publishRaw([]byte(`{"volume-type":"block","device":`)))
	s.check(t, "refuse-broken", f.refuses)
	s.check(t, "refuse-others", func(t *trial) { startsPlain(t, f.pod) }, "plain-container")
	t.must(f.vol.publish())
	s.check(t, "refuse-alone", func(t *trial) { refusesAlone(t, f) })
	s.check(t, "refuse-clean", func(t *trial) { isUntouched(t, f) })
	t.must(f.vol.unpublish())
	s.check(t, "refuse-unpublished", f.refuses)
	runRefuseSecond(t, s)
}

// refusesAlone asks for a container without a sandbox, and for a sandbox that mounts the
// volume itself.
func refusesAlone(t *trial, f *fixture) {
	spec := f.pod.containerSpec("alone", []bind{all(f.vol)})
	spec.Annotations = nil
	newContainer(f.pod.n, "alone").isRefused(t, spec)
	self := &pod{n: f.pod.n, uid: f.pod.uid, sandbox: newContainer(f.pod.n, "sandbox")}
	spec = self.sandboxSpec()
	spec.Mounts = append(spec.Mounts, all(f.vol).mount())
	self.sandbox.isRefused(t, spec)
}

// isUntouched fails if a refused volume was mounted or bound.
func isUntouched(t *trial, f *fixture) {
	dir, err := f.vol.open()
	t.must(err)
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err == nil && len(ids) > 0 {
		err = fmt.Errorf("there are files named by sandboxes: %q", ids)
	}
	t.must(errors.Join(err, f.disk.free(), f.pod.n.mounts.CheckNone()))
}

// runRefuseSecond publishes one device to two pods.
func runRefuseSecond(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	second := newVolume(t, s.node, f.disk, s.node.podUID(), "pv")
	other := newPod(t, s.node, second.owner)
	s.check(t, "refuse-second", func(t *trial) {
		f.container(t, "main")
		other.refuses(t, all(second))
	}, "mount-inside")
}
