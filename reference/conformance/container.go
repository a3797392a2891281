package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// container is one that the handler runs.
type container struct {
	n   *node
	id  string
	pid string
}

func newContainer(n *node, kind string) *container { return &container{n: n, id: n.id(kind)} }

// endsWithin bounds the wait for a killed container.
const endsWithin = time.Minute

// create creates the container. It is removed at the end, even if creating it fails.
func (c *container) create(ctx context.Context, spec *specs.Spec) (programResult, error) {
	bundle, err := writeBundle(c.n.path("bundles", c.id), spec)
	if err != nil {
		return programResult{}, err
	}
	c.n.scratch.add(func(ctx context.Context) error {
		return errors.Join(c.removeByForce(ctx), os.RemoveAll(bundle))
	})
	return c.n.handler.run(ctx, "create", "--bundle", bundle, c.id)
}

// startsUnlessRefused creates and starts it, and reports whether it was not refused.
func (c *container) startsUnlessRefused(t *trial, spec *specs.Spec) bool {
	ended, err := c.create(t.ctx, spec)
	t.must(err)
	if ended.code != 0 {
		return false
	}
	_, err = c.n.handler.must(t.ctx, "start", c.id)
	t.must(err)
	return true
}

// run creates and starts it.
func (c *container) run(ctx context.Context, spec *specs.Spec) error {
	ended, err := c.create(ctx, spec)
	if err != nil {
		return err
	}
	if ended.code != 0 {
		return fmt.Errorf("create: status %d: %s", ended.code, lastLine(ended.stderr))
	}
	if _, err := c.n.handler.must(ctx, "start", c.id); err != nil {
		return err
	}
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	c.pid = strconv.Itoa(state.PID)
	return nil
}

type state struct {
	PID    int    `json:"pid"`
	Status string `json:"status"`
}

func (c *container) state(ctx context.Context) (state, error) {
	var is state
	out, err := c.n.handler.must(ctx, "state", c.id)
	if err != nil {
		return is, err
	}
	if err := json.Unmarshal([]byte(out), &is); err != nil {
		return is, fmt.Errorf("its command state printed %.200q, and not JSON with a pid, as runc does: is it a container runtime?", out)
	}
	return is, nil
}

// exec runs the probe in the container.
func (c *container) exec(ctx context.Context, words ...string) (string, error) {
	args := append([]string{"exec", c.id, "/probe", ProbeWord}, words...)
	ended, err := c.n.handler.run(ctx, args...)
	if err == nil && ended.code != 0 {
		err = fmt.Errorf("%s in the container: %s", strings.Join(words, " "), lastLine(ended.stderr))
	}
	return ended.stdout, err
}

// ask runs the probe and reads its answer.
func ask[T any](ctx context.Context, c *container, words ...string) (answer T, err error) {
	out, err := c.exec(ctx, words...)
	if err != nil {
		return answer, err
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		return answer, fmt.Errorf("%s in the container: %w", words[0], err)
	}
	return answer, nil
}

// kill kills it and waits for its end. One that has ended already, as those of a virtual
// machine do with their sandbox, cannot be killed, and need not.
func (c *container) kill(ctx context.Context, signal syscall.Signal) error {
	_, killed := c.n.handler.must(ctx, "kill", c.id, strconv.Itoa(int(signal)))
	return eventually(ctx, endsWithin, func(ctx context.Context) error {
		is, err := c.state(ctx)
		if err == nil && is.Status != "stopped" {
			err = errors.Join(killed, fmt.Errorf("the container is %s after it was killed", is.Status))
		}
		return err
	})
}

func (c *container) remove(ctx context.Context) error {
	_, err := c.n.handler.must(ctx, "delete", c.id)
	return err
}

// removeByForce removes a container in any state.
func (c *container) removeByForce(ctx context.Context) error {
	_, err := c.n.handler.must(ctx, "delete", "--force", c.id)
	// If create was killed, the runtime does not know the container any more, but its
	// control groups are left, and perhaps a process in them.
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		groups, globErr := filepath.Glob(pattern + c.id)
		err = errors.Join(err, globErr)
		for _, group := range groups {
			err = errors.Join(err, eventually(ctx, endsWithin, func(context.Context) error { return removeGroup(group) }))
		}
	}
	return err
}

func removeGroup(group string) error {
	err := unix.Rmdir(group)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		err = errors.Join(err, killGroup(group))
	}
	return fmt.Errorf("remove the control group %s: %w", group, err)
}

// killGroup kills what is in a control group.
func killGroup(group string) error {
	raw, err := os.ReadFile(filepath.Join(group, "cgroup.procs")) //nolint:gosec // a group of ours
	if err != nil {
		return err
	}
	for _, word := range strings.Fields(string(raw)) {
		if pid, err := strconv.Atoi(word); err == nil && pid > 1 {
			_ = unix.Kill(pid, unix.SIGKILL) // it may have ended by itself
		}
	}
	return nil
}
