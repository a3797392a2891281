package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// refuse has what no container may be given.
func (s *suite) refuse(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	for _, one := range []struct {
		name   string
		change func(*abi.Info)
	}{
		{"refuse-pod", func(info *abi.Info) { info.Metadata["crust.podUID"] = "00000000-0000-4000-8000-000000000000" }},
		{"refuse-device", func(info *abi.Info) { info.Metadata["crust.device"] = "1:1" }},
		{"refuse-target", func(info *abi.Info) { info.Metadata["crust.targetPath"] += "-other" }},
		{"refuse-type", func(info *abi.Info) { info.VolumeType = "a-later-type" }},
	} {
		if err := st.vol.publishOdd(one.change); err != nil {
			return err
		}
		s.check(ctx, one.name, st.refusesAll)
	}
	s.check(ctx, "refuse-option", func(ctx context.Context) error {
		for _, option := range []string{"no-such-option=1", "bind", "loop"} {
			err := st.vol.publishOdd(func(info *abi.Info) { info.Options = []string{option} })
			if err == nil {
				err = st.refusesAll(ctx)
			}
			if err != nil {
				return fmt.Errorf("the option %q: %w", option, err)
			}
		}
		return nil
	})
	if err := st.vol.publishRaw([]byte(`{"volume-type":"block","device":`)); err != nil {
		return err
	}
	s.check(ctx, "refuse-broken", st.refusesAll)
	s.check(ctx, "refuse-others", func(ctx context.Context) error { return st.pod.startsPlain(ctx) }, "plain-container")
	if err := st.vol.publish(); err != nil {
		return err
	}
	s.check(ctx, "refuse-alone", st.refusesAlone)
	s.check(ctx, "refuse-clean", func(context.Context) error { return st.isUntouched() })
	if err := st.vol.unpublish(); err != nil {
		return err
	}
	s.check(ctx, "refuse-unpublished", st.refusesAll)
	return s.refuseSecond(ctx)
}

func (st *stage) refusesAll(ctx context.Context) error { return st.pod.refuses(ctx, all(st.vol)) }

// refusesAlone asks for a container that says nothing of a sandbox, and for a
// sandbox that mounts the volume itself.
func (st *stage) refusesAlone(ctx context.Context) error {
	alone := &container{n: st.pod.n, id: st.pod.n.id("alone")}
	spec := st.pod.containerSpec("alone", []bind{all(st.vol)})
	spec.Annotations = nil
	ended, err := alone.create(ctx, spec)
	if err == nil {
		err = wasRefused(ended)
	}
	if err != nil {
		return err
	}
	self := &pod{n: st.pod.n, uid: st.pod.uid, sandbox: &container{n: st.pod.n, id: st.pod.n.id("sandbox")}}
	spec = self.sandboxSpec()
	spec.Mounts = append(spec.Mounts, all(st.vol).mount())
	if ended, err = self.sandbox.create(ctx, spec); err != nil {
		return err
	}
	return wasRefused(ended)
}

// isUntouched fails where a refused volume was mounted or bound.
func (st *stage) isUntouched() error {
	dir, err := st.vol.open()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err == nil && len(ids) > 0 {
		err = fmt.Errorf("there are files named by sandboxes: %q", ids)
	}
	return errors.Join(err, st.disk.free(), st.pod.n.host.none())
}

// refuseSecond has two pods want one device.
func (s *suite) refuseSecond(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	second, err := s.node.newVolume(st.disk, s.node.podUID())
	if err != nil {
		return err
	}
	other, err := s.node.newPod(ctx, second.owner)
	if err != nil {
		return err
	}
	s.check(ctx, "refuse-second", func(ctx context.Context) error {
		if _, err := st.pod.container(ctx, "main", all(st.vol)); err != nil {
			return err
		}
		return other.refuses(ctx, all(second))
	}, "mount-inside")
	return nil
}
