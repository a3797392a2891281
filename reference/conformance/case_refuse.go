package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// refuseCase publishes volumes that no container may get.
type refuseCase struct{ f *fixture }

func runRefuse(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &refuseCase{f: f}
	for _, one := range []struct {
		name   string
		change func(*abi.Info)
	}{
		{"refuse-pod", func(info *abi.Info) { info.Metadata["crust.podUID"] = "00000000-0000-4000-8000-000000000000" }},
		{"refuse-device", func(info *abi.Info) { info.Metadata["crust.device"] = "1:1" }},
		{"refuse-target", func(info *abi.Info) { info.Metadata["crust.targetPath"] += "-other" }},
		{"refuse-type", func(info *abi.Info) { info.VolumeType = "a-later-type" }},
	} {
		if err := t.f.vol.publishOdd(one.change); err != nil {
			return err
		}
		s.check(ctx, one.name, t.refusesAll)
	}
	s.check(ctx, "refuse-option", func(ctx context.Context) error {
		for _, option := range []string{"no-such-option=1", "bind", "loop"} {
			err := t.f.vol.publishOdd(func(info *abi.Info) { info.Options = []string{option} })
			if err == nil {
				err = t.refusesAll(ctx)
			}
			if err != nil {
				return fmt.Errorf("the option %q: %w", option, err)
			}
		}
		return nil
	})
	if err := t.f.vol.publishRaw([]byte(`{"volume-type":"block","device":`)); err != nil {
		return err
	}
	s.check(ctx, "refuse-broken", t.refusesAll)
	s.check(ctx, "refuse-others", func(ctx context.Context) error { return t.f.pod.startsPlain(ctx) }, "plain-container")
	if err := t.f.vol.publish(); err != nil {
		return err
	}
	s.check(ctx, "refuse-alone", t.refusesAlone)
	s.check(ctx, "refuse-clean", func(context.Context) error { return t.isUntouched() })
	if err := t.f.vol.unpublish(); err != nil {
		return err
	}
	s.check(ctx, "refuse-unpublished", t.refusesAll)
	return runRefuseSecond(ctx, s)
}

func (t *refuseCase) refusesAll(ctx context.Context) error { return t.f.pod.refuses(ctx, all(t.f.vol)) }

// refusesAlone asks for a container without a sandbox, and for a sandbox that mounts the
// volume itself.
func (t *refuseCase) refusesAlone(ctx context.Context) error {
	alone := newContainer(t.f.pod.n, "alone")
	spec := t.f.pod.containerSpec("alone", []bind{all(t.f.vol)})
	spec.Annotations = nil
	ended, err := alone.create(ctx, spec)
	if err == nil {
		err = wasRefused(ended)
	}
	if err != nil {
		return err
	}
	self := &pod{n: t.f.pod.n, uid: t.f.pod.uid, sandbox: newContainer(t.f.pod.n, "sandbox")}
	spec = self.sandboxSpec()
	spec.Mounts = append(spec.Mounts, all(t.f.vol).mount())
	if ended, err = self.sandbox.create(ctx, spec); err != nil {
		return err
	}
	return wasRefused(ended)
}

// isUntouched fails if a refused volume was mounted or bound.
func (t *refuseCase) isUntouched() error {
	dir, err := t.f.vol.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err == nil && len(ids) > 0 {
		err = fmt.Errorf("there are files named by sandboxes: %q", ids)
	}
	return errors.Join(err, t.f.disk.free(), t.f.pod.n.mounts.checkNone())
}

// runRefuseSecond publishes one device to two pods.
func runRefuseSecond(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	second, err := newVolume(s.node, f.disk, s.node.podUID(), "pv")
	if err != nil {
		return err
	}
	other, err := newPod(ctx, s.node, second.owner)
	if err != nil {
		return err
	}
	s.check(ctx, "refuse-second", func(ctx context.Context) error {
		if _, err := f.container(ctx, "main"); err != nil {
			return err
		}
		return other.refuses(ctx, all(second))
	}, "mount-inside")
	return nil
}
