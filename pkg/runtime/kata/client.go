package kata

import (
	"context"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// client sends requests to the shims of volumes' sandboxes. Sandboxes come and go under
// one publish, so it looks for the live one when the last known is gone.
type client struct {
	cfg      *Config
	pool     *pool
	bindings *bindings
}

// request encodes a request for a shim.
type request func(s shim) ([]byte, error)

// call sends one request to the volume's live sandbox and reads the answer,
// whatever its status. The request must be one that may be sent twice.
func (cl *client) call(ctx context.Context, v *volume.Volume, encode request) (reply, shim, error) {
	rep, s, c, err := cl.callBy(ctx, v, false, encode)
	// A kept connection that the shim closed meanwhile says nothing of the
	// sandbox; a new one does.
	if err == nil || c == nil || !c.kept || !errors.Is(err, errHungUp) || ctx.Err() != nil {
		return rep, s, err
	}
	cl.pool.drop(c.socket)
	return cl.callOnce(ctx, v, encode)
}

func (cl *client) callOnce(ctx context.Context, v *volume.Volume, encode request) (reply, shim, error) {
	rep, s, _, err := cl.callBy(ctx, v, true, encode)
	return rep, s, err
}

// callBy sends a request by a kept or a fresh connection, and tells which.
func (cl *client) callBy(ctx context.Context, v *volume.Volume, fresh bool, encode request) (reply, shim, *conn, error) {
	c, s, err := cl.connect(ctx, v, fresh)
	if err != nil {
		return reply{}, s, nil, err
	}
	raw, err := encode(s)
	if err != nil {
		c.close()
		return reply{}, s, nil, err
	}
	rep, reusable, err := c.exchange(ctx, raw)
	if err != nil {
		c.close()
		return reply{}, s, c, exchangeError(ctx, v, s.id, err)
	}
	if reusable {
		cl.pool.put(c)
	} else {
		c.close()
	}
	return rep, s, c, nil
}

// connect reaches the live sandbox of a volume. It tries the present binding
// first, then every sandbox that may have the volume.
func (cl *client) connect(ctx context.Context, v *volume.Volume, fresh bool) (*conn, shim, error) {
	if s := cl.bindings.current(v); s.id != "" {
		c, err := cl.reach(ctx, s, fresh)
		if err == nil {
			return c, s, nil
		}
		if ctx.Err() != nil {
			return nil, s, contextError(v, s.id, ctx.Err())
		}
	}
	return cl.search(ctx, v, fresh)
}

func (cl *client) reach(ctx context.Context, s shim, fresh bool) (*conn, error) {
	socket := cl.cfg.socketOf(s.id, s.flavor)
	if fresh {
		return dial(ctx, socket)
	}
	return cl.pool.get(ctx, socket)
}

// search finds the first sandbox that accepts a connection. The dead ones are
// forgotten; their files stay, as Kata's own.
func (cl *client) search(ctx context.Context, v *volume.Volume, fresh bool) (*conn, shim, error) {
	ids := cl.bindings.candidates(v)
	failures := make([]failure, 0, len(ids))
	for _, id := range ids {
		c, s, err := cl.reachAny(ctx, id, fresh)
		if err == nil {
			cl.bindings.propose(v, s)
			return c, s, nil
		}
		if ctx.Err() != nil {
			return nil, s, contextError(v, id, ctx.Err())
		}
		failures = append(failures, failure{id, err})
	}
	cl.bindings.table.Unbind(v.Key)
	return nil, shim{}, noSandbox(v, failures, cl.bindings.trackerHint())
}

// reachAny tries the socket of the Go runtime, then that of runtime-rs, as
// Kata's own tools do. The error is that of the socket which is there.
func (cl *client) reachAny(ctx context.Context, id string, fresh bool) (*conn, shim, error) {
	s := shim{id, goShim}
	c, goErr := cl.reach(ctx, s, fresh)
	if goErr == nil || ctx.Err() != nil {
		return c, s, goErr
	}
	s.flavor = rustShim
	c, err := cl.reach(ctx, s, fresh)
	if err != nil && errors.Is(err, unix.ENOENT) {
		err = goErr
	}
	return c, s, err
}

func (cl *client) lives(ctx context.Context, s shim) bool {
	c, err := cl.reach(ctx, s, true)
	if err != nil {
		return false
	}
	c.close()
	return true
}

// drop closes what is kept of a sandbox that has ended.
func (cl *client) drop(id string) {
	cl.pool.drop(cl.cfg.socketOf(id, goShim))
	cl.pool.drop(cl.cfg.socketOf(id, rustShim))
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

// unsupported are the words by which shims and agents say that they cannot do
// what was asked: agents without the call, and confidential guests, whose
// policy forbids it.
var unsupported = []string{
	"resize_volume is not implemented", "unimplemented", "is not supported", "blocked by policy",
}

// dying are the words by which a shim says that it, or its agent, is on its way out.
var dying = []string{"ttrpc: closed", "connection reset", "context canceled", "dead agent"}

func saysOneOf(text string, words []string) bool {
	return slices.ContainsFunc(words, func(one string) bool { return strings.Contains(text, one) })
}

func statusError(v *volume.Volume, what string, s shim, rep reply) error {
	text := guest.Printable(string(rep.body), guest.MaxErrorText)
	if text == "" {
		text = "no text"
	}
	kind, hint := volume.Refused, ""
	lower := strings.ToLower(text)
	switch {
	case strings.Contains(lower, "not found in sandbox"):
		return volume.Errorf(volume.NoSandbox, "volume %s: Kata sandbox %s (%s) %w: it answered %s with %s",
			v.Target, s.id, s.flavor, errNotMounted, what, text)
	case saysOneOf(lower, dying):
		kind, hint = volume.NoSandbox, "; it is ending, or its agent has died"
	case saysOneOf(lower, unsupported):
		kind = volume.Unsupported
	}
	if rep.status == 404 || rep.status == 405 || rep.status == 501 {
		kind, hint = volume.Unsupported, "; this Kata release does not know the call"
	}
	return volume.Errorf(kind, "volume %s: Kata sandbox %s (%s) answered %s with status %d: %s%s",
		v.Target, s.id, s.flavor, what, rep.status, text, hint)
}
