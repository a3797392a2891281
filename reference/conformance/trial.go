package conformance

import (
	"context"
	"runtime"
)

// trial tests one requirement, or sets up what several need.
type trial struct {
	ctx context.Context
	err error
}

// try calls f, which ends when it returns or when must fails, and returns the error of must.
func try(ctx context.Context, f func(*trial)) error {
	t := &trial{ctx: ctx}
	ended := make(chan struct{})
	go func() { defer close(ended); f(t) }()
	<-ended
	return t.err
}

// must ends the trial at an error. It is for the goroutine of the trial.
func (t *trial) must(err error) {
	if err != nil {
		t.err = err
		runtime.Goexit()
	}
}

// container runs a container of a pod.
func (t *trial) container(p *pod, name string, binds ...bind) *container {
	c, err := p.container(t.ctx, name, binds...)
	t.must(err)
	return c
}

// exec runs the probe in a container.
func (t *trial) exec(c *container, words ...string) string {
	out, err := c.exec(t.ctx, words...)
	t.must(err)
	return out
}

// wantText fails unless a file in the container has a content; what names it in the error.
func (t *trial) wantText(c *container, path, what, content string) {
	t.must(want(what, t.exec(c, "read", path), content))
}

// asked runs the probe and parses its answer.
func asked[T any](t *trial, c *container, words ...string) T {
	answer, err := ask[T](t.ctx, c, words...)
	t.must(err)
	return answer
}
