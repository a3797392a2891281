package kata

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// client sends requests to the shims of volumes' sandboxes. Sandboxes come and go while a
// volume is published, so it searches for the live one when the last known one is gone.
type client struct {
	cfg      *Config
	bindings *bindings
	kept     kept
}

func (cl *client) reach(ctx context.Context, s shim) (*conn, error) {
	return cl.kept.dial(ctx, cl.cfg.socketOf(s.id, s.flavor))
}

// connect connects to the live sandbox of a volume. It tries the present binding first, then
// every sandbox that may have the volume.
func (cl *client) connect(ctx context.Context, v *volume.Volume) (*conn, shim, error) {
	if s := cl.bindings.current(v); s.id != "" {
		c, err := cl.reach(ctx, s)
		if err == nil {
			return c, s, nil
		}
		if ctx.Err() != nil {
			return nil, s, contextError(v, s.id, ctx.Err())
		}
	}
	return cl.search(ctx, v)
}

// search finds the first sandbox that accepts a connection. If none does, the volume is
// unbound; the sandboxes' files stay, as they are Kata's.
func (cl *client) search(ctx context.Context, v *volume.Volume) (*conn, shim, error) {
	last := cl.bindings.current(v)
	ids, _ := cl.bindings.candidates(v)
	failures := make([]failure, 0, len(ids))
	for _, id := range ids {
		c, s, err := cl.reachAny(ctx, id)
		if err == nil {
			cl.bindings.propose(v, s)
			return c, s, nil
		}
		failures = append(failures, failure{id, err})
		if ctx.Err() != nil {
			return nil, s, cl.unreached(ctx, v, failures...)
		}
	}
	cl.bindings.table.Unbind(v.Key, last.id)
	return nil, shim{}, cl.unreached(ctx, v, failures...)
}

// unreached is the error if none of the sandboxes accepts a connection. The last failure is that of the last attempt.
func (cl *client) unreached(ctx context.Context, v *volume.Volume, failures ...failure) error {
	if len(failures) > 0 && ctx.Err() != nil {
		return contextError(v, failures[len(failures)-1].id, ctx.Err())
	}
	hint := ""
	if tracked := cl.bindings.sandboxes; tracked == nil || !tracked.Ready() {
		hint = " (the container runtime is not followed now, so that sandboxes of runtime-rs cannot be found: check its socket)"
	}
	return noSandbox(v, failures, hint)
}

// reachAny tries the socket of the Go runtime, then that of runtime-rs, as Kata's own tools
// do. The error is that of the socket that exists.
func (cl *client) reachAny(ctx context.Context, id string) (*conn, shim, error) {
	s := shim{id, goShim}
	c, goErr := cl.reach(ctx, s)
	if goErr == nil || ctx.Err() != nil {
		return c, s, goErr
	}
	s.flavor = rustShim
	c, err := cl.reach(ctx, s)
	if err != nil && errors.Is(err, unix.ENOENT) {
		err = goErr
	}
	return c, s, err
}

func (cl *client) lives(ctx context.Context, s shim) bool {
	c, err := dial(ctx, cl.cfg.socketOf(s.id, s.flavor))
	if err != nil {
		return false
	}
	c.close()
	return true
}

type failure struct {
	id  string
	err error
}

func noSandbox(v *volume.Volume, failures []failure, hint string) error {
	if len(failures) == 0 {
		return volume.Errorf(volume.NoSandbox, "volume %s: no Kata sandbox has used it yet%s", v.Target, hint)
	}
	kind := volume.NoSandbox
	var parts []string
	for _, f := range failures {
		if len(parts) < 4 {
			parts = append(parts, "sandbox "+f.id+" "+whyDead(f))
		}
		if errors.Is(f.err, unix.EACCES) || errors.Is(f.err, unix.EPERM) || errors.Is(f.err, unix.EMFILE) {
			kind = volume.Internal
		}
	}
	return volume.Errorf(kind, "volume %s: no live Kata sandbox has it: %s%s: %w",
		v.Target, strings.Join(parts, "; "), hint, failures[0].err)
}

func whyDead(f failure) string {
	switch {
	case errors.Is(f.err, unix.ENOENT):
		return "has no management socket (it has ended, or its VMM runs rootless below /run/user, which is not supported)"
	case errors.Is(f.err, unix.ECONNREFUSED):
		return "refuses connections on its management socket (its shim has died)"
	default:
		return "cannot be reached"
	}
}

func exchangeError(ctx context.Context, v *volume.Volume, id string, err error) error {
	if ctx.Err() != nil {
		return contextError(v, id, ctx.Err())
	}
	switch {
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return volume.Errorf(volume.NoSandbox, "volume %s: Kata sandbox %s is ending, or its shim has died: %w", v.Target, id, err)
	case errors.Is(err, errTooMuch):
		return volume.Errorf(volume.Exhausted, "volume %s: Kata sandbox %s sent an answer of more than %d bytes, "+
			"which was not read on: %w", v.Target, id, maxBody, err)
	case errors.Is(err, errCutShort), errors.Is(err, errNotHTTP):
		return volume.Errorf(volume.Malformed, "volume %s: Kata sandbox %s sent an answer that cannot be read: %s",
			v.Target, id, guest.Printable(err.Error(), guest.MaxErrorText))
	case errors.Is(err, errHungUp):
		return volume.Errorf(volume.NoSandbox, "volume %s: Kata sandbox %s closed the connection without an answer; "+
			"it may be ending: %w", v.Target, id, err)
	default:
		return volume.Errorf(volume.Internal, "volume %s: Kata sandbox %s cannot be spoken to: %w", v.Target, id, err)
	}
}

// unsupported are parts of the error texts of shims and agents that cannot do what was
// asked: agents without the call, and confidential guests, whose policy forbids it.
var unsupported = []string{
	"resize_volume is not implemented", "unimplemented", "is not supported", "blocked by policy",
}

// unmounted are parts of the error texts of a sandbox that lives and does not have the
// volume: the Go shim's own, and those of an agent that has unmounted it while its disk is
// still attached. The agent's are Rust's debug text of ENOENT and its name.
var unmounted = []string{"not found in sandbox", "os { code: 2,", "enoent"}

// dying are parts of the error texts of a shim that is ending, or whose agent is.
var dying = []string{"ttrpc: closed", "connection reset", "context canceled", "dead agent"}

func containsOneOf(text string, parts []string) bool {
	return slices.ContainsFunc(parts, func(one string) bool { return strings.Contains(text, one) })
}

func statusError(v *volume.Volume, what string, s shim, rep reply) error {
	text := cmp.Or(guest.Printable(string(rep.body), guest.MaxErrorText), "no text")
	kind, hint := volume.Refused, ""
	lower := strings.ToLower(text)
	switch {
	case containsOneOf(lower, unmounted):
		return volume.Errorf(volume.NoSandbox, "volume %s: Kata sandbox %s (%s) %w: it answered %s with %s",
			v.Target, s.id, s.flavor, errNotMounted, what, text)
	case containsOneOf(lower, dying):
		kind, hint = volume.NoSandbox, "; it is ending, or its agent has died"
	case containsOneOf(lower, unsupported):
		kind = volume.Unsupported
	}
	if rep.status == 404 || rep.status == 405 || rep.status == 501 {
		kind, hint = volume.Unsupported, "; this Kata release does not know the call"
	}
	return volume.Errorf(kind, "volume %s: Kata sandbox %s (%s) answered %s with status %d: %s%s",
		v.Target, s.id, s.flavor, what, rep.status, text, hint)
}
