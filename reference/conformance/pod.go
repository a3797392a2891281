package conformance

import (
	"context"
	"errors"
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
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
	mode       string // "" is rw
	owners     []specs.LinuxIDMapping
}

// all mounts the whole volume at /data.
func all(v *testVolume) bind { return bind{source: v.target, at: "/data"} }

// newPod runs a sandbox.
func newPod(t *trial, n *node, uid string) *pod {
	p := &pod{n: n, uid: uid, sandbox: newContainer(n, "sandbox")}
	if err := p.sandbox.run(t.ctx, p.sandboxSpec()); err != nil {
		t.must(fmt.Errorf("the sandbox: %w", err))
	}
	return p
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
func (p *pod) refuses(t *trial, binds ...bind) {
	newContainer(p.n, "refused").isRefused(t, p.containerSpec("refused", binds))
}

// isRefused fails if the runtime creates the container.
func (c *container) isRefused(t *trial, spec *specs.Spec) {
	ended, err := c.create(t.ctx, spec)
	t.must(err)
	if ended.code == 0 {
		t.must(errors.New("the runtime created the container; it should have refused it"))
	}
	if ended.stderr == "" {
		t.must(fmt.Errorf("the runtime refused the container (status %d) and does not say why", ended.code))
	}
}

// end kills the pod and removes its containers.
func (p *pod) end(t *trial, containers ...*container) {
	for _, c := range append(containers, p.sandbox) {
		t.must(c.kill(t.ctx, unix.SIGKILL))
		t.must(c.remove(t.ctx))
	}
}
