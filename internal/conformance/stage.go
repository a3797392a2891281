package conformance

import (
	"context"
	"fmt"
)

// stage is what most scenes begin with: a volume, and a sandbox of its pod.
type stage struct {
	disk *disk
	vol  *volume
	pod  *pod
}

func (s *suite) set(ctx context.Context) (*stage, error) { return s.setFor(ctx, s.node.podUID()) }

// setFor makes it for a pod. What is undone is so in the opposite order: further
// disks of the pod are made before.
func (s *suite) setFor(ctx context.Context, pod string) (*stage, error) {
	disk, err := s.node.newDisk(ctx)
	if err != nil {
		return nil, err
	}
	v, err := s.node.newVolume(disk, pod)
	if err != nil {
		return nil, err
	}
	p, err := s.node.newPod(ctx, v.owner)
	if err != nil {
		return nil, fmt.Errorf("%s cannot run a plain sandbox: %w", s.opts.Runtime, err)
	}
	return &stage{disk: disk, vol: v, pod: p}, nil
}

// podUID makes the UID of a pod.
func (n *node) podUID() string {
	n.count++
	return fmt.Sprintf("%s-0000-4000-8000-%012d", n.run, n.count)
}

// again ends the pod and runs a new sandbox of it, as kubelet does without a word
// to anybody, after the broker has cleared the dead one away.
func (st *stage) again(ctx context.Context, containers ...*container) error {
	if err := st.pod.end(ctx, containers...); err != nil {
		return err
	}
	if err := eventually(ctx, endsWithin, func(context.Context) error { return st.disk.free() }); err != nil {
		return err
	}
	if err := st.vol.unbind(); err != nil {
		return err
	}
	next, err := st.pod.n.newPod(ctx, st.vol.owner)
	if err != nil {
		return err
	}
	st.pod = next
	return nil
}
