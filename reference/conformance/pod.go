package conformance

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// pod is a sandbox, and then its containers.
type pod struct {
	n       *node
	uid     string
	sandbox *container
}

// bind is a mount of a container.
type bind struct {
	source, at string
	readOnly   bool
}

// all mounts the whole volume at /data.
func all(v *testVolume) bind { return bind{source: v.target, at: "/data"} }

// newPod runs a sandbox.
func newPod(ctx context.Context, n *node, uid string) (*pod, error) {
	p := &pod{n: n, uid: uid, sandbox: newContainer(n, "sandbox")}
	if err := p.sandbox.run(ctx, p.sandboxSpec()); err != nil {
		return nil, fmt.Errorf("the sandbox: %w", err)
	}
	return p, nil
}

// container runs a container of the pod.
func (p *pod) container(ctx context.Context, name string, binds ...bind) (*container, error) {
	c := newContainer(p.n, name)
	if err := c.run(ctx, p.containerSpec(name, binds)); err != nil {
		return nil, fmt.Errorf("the container %q: %w", name, err)
	}
	return c, nil
}

// refuses fails if the pod gets a container with these mounts.
func (p *pod) refuses(ctx context.Context, binds ...bind) error {
	c := newContainer(p.n, "refused")
	spec := p.containerSpec("refused", binds)
	ended, err := c.create(ctx, spec)
	if err != nil {
		return err
	}
	return wasRefused(ended)
}

func wasRefused(ended programResult) error {
	if ended.code == 0 {
		return errors.New("the runtime created the container; it should have refused it")
	}
	if ended.stderr == "" {
		return fmt.Errorf("the runtime refused the container (status %d) and does not say why", ended.code)
	}
	return nil
}

// end kills the pod and removes its containers.
func (p *pod) end(ctx context.Context, containers ...*container) error {
	for _, c := range append(containers, p.sandbox) {
		if err := c.kill(ctx, unix.SIGKILL); err != nil {
			return err
		}
		if err := c.remove(ctx); err != nil {
			return err
		}
	}
	return nil
}
