package conformance

import (
	"errors"
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"

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
		t.must(f.vol.publishOdd(one.change))
		s.check(t, one.name, f.refuses)
	}
	s.check(t, "refuse-option", func(t *trial) {
		for _, option := range []string{"no-such-option=1", "bind", "loop"} {
			t.must(f.vol.publishOdd(func(info *abi.Info) { info.Options = []string{option} }))
			if err := f.pod.refuses(t.ctx, all(f.vol)); err != nil {
				t.must(fmt.Errorf("the option %q: %w", option, err))
			}
		}
	})
	t.must(f.vol.publishRaw([]byte(`{"volume-type":"block","device":`)))
	s.check(t, "refuse-broken", f.refuses)
	s.check(t, "refuse-others", func(t *trial) { startsPlain(t, f.pod) }, "plain-container")
	t.must(f.vol.publish())
	s.check(t, "refuse-alone", f.refusesAlone)
	s.check(t, "refuse-clean", f.isUntouched)
	t.must(f.vol.unpublish())
	s.check(t, "refuse-unpublished", f.refuses)
	runRefuseSecond(t, s)
}

// refusesAlone asks for a container without a sandbox, and for a sandbox that mounts the
// volume itself.
func (f *fixture) refusesAlone(t *trial) {
	refused := func(c *container, spec *specs.Spec) {
		ended, err := c.create(t.ctx, spec)
		t.must(err)
		t.must(wasRefused(ended))
	}
	spec := f.pod.containerSpec("alone", []bind{all(f.vol)})
	spec.Annotations = nil
	refused(newContainer(f.pod.n, "alone"), spec)
	self := &pod{n: f.pod.n, uid: f.pod.uid, sandbox: newContainer(f.pod.n, "sandbox")}
	spec = self.sandboxSpec()
	spec.Mounts = append(spec.Mounts, all(f.vol).mount())
	refused(self.sandbox, spec)
}

// isUntouched fails if a refused volume was mounted or bound.
func (f *fixture) isUntouched(t *trial) {
	dir, err := f.vol.open()
	t.must(err)
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err == nil && len(ids) > 0 {
		err = fmt.Errorf("there are files named by sandboxes: %q", ids)
	}
	t.must(errors.Join(err, f.disk.free(), f.pod.n.mounts.checkNone()))
}

// runRefuseSecond publishes one device to two pods.
func runRefuseSecond(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	second, err := newVolume(s.node, f.disk, s.node.podUID(), "pv")
	t.must(err)
	other, err := newPod(t.ctx, s.node, second.owner)
	t.must(err)
	s.check(t, "refuse-second", func(t *trial) {
		f.container(t, "main")
		t.must(other.refuses(t.ctx, all(second)))
	}, "mount-inside")
}
