package kata

import (
	"context"
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
)

// call sends one request to the volume's live sandbox and reads the answer,
// whatever its status.
func (h *Handler) call(ctx context.Context, v *deferral.Volume, request func(binding) ([]byte, error)) (reply, binding, error) {
	for fresh := false; ; fresh = true {
		c, b, err := h.connect(ctx, v, fresh)
		if err != nil {
			return reply{}, b, err
		}
		raw, err := request(b)
		if err != nil {
			c.close()
			return reply{}, b, err
		}
		rep, reusable, err := c.exchange(ctx, raw)
		if err == nil && reusable {
			h.pool.put(c)
			return rep, b, nil
		}
		c.close()
		if err == nil {
			return rep, b, nil
		}
		// A kept connection that the shim closed meanwhile says nothing of the
		// sandbox; a new one does.
		if !c.kept || !errors.Is(err, errHungUp) || ctx.Err() != nil {
			return reply{}, b, exchangeError(ctx, v, b.id, err)
		}
		h.pool.drop(c.socket)
	}
}

// connect reaches the live sandbox of a volume. It tries the present binding
// first, then every sandbox that may have the volume: sandboxes come and go
// under one publish.
func (h *Handler) connect(ctx context.Context, v *deferral.Volume, fresh bool) (*conn, binding, error) {
	if b, _, _ := h.current(v); b.id != "" {
		c, err := h.reach(ctx, h.socketOf(b.id, b.flavor), fresh)
		if err == nil {
			return c, b, nil
		}
		if ctx.Err() != nil {
			return nil, b, contextError(v, b.id, ctx.Err())
		}
	}
	return h.search(ctx, v, fresh)
}

func (h *Handler) reach(ctx context.Context, socket string, fresh bool) (*conn, error) {
	if fresh {
		return dial(ctx, socket)
	}
	return h.pool.get(ctx, socket)
}

// search finds the first sandbox that accepts a connection. The dead ones are
// forgotten; their files stay, as Kata's own.
func (h *Handler) search(ctx context.Context, v *deferral.Volume, fresh bool) (*conn, binding, error) {
	ids := h.candidates(v)
	failures := make([]failure, 0, len(ids))
	for _, id := range ids {
		c, f, err := h.reachAny(ctx, id, fresh)
		if err == nil {
			return c, h.bind(v, id, f), nil
		}
		if ctx.Err() != nil {
			return nil, binding{id: id, flavor: f}, contextError(v, id, ctx.Err())
		}
		failures = append(failures, failure{id, err})
	}
	h.bind(v, "", goShim)
	return nil, binding{}, h.noSandbox(v, failures)
}

// reachAny tries the socket of the Go runtime, then that of runtime-rs, as
// Kata's own tools do. The error is that of the socket which is there.
func (h *Handler) reachAny(ctx context.Context, id string, fresh bool) (*conn, flavor, error) {
	c, goErr := h.reach(ctx, h.socketOf(id, goShim), fresh)
	if goErr == nil || ctx.Err() != nil {
		return c, goShim, goErr
	}
	c, err := h.reach(ctx, h.socketOf(id, rustShim), fresh)
	if err != nil && errors.Is(err, unix.ENOENT) {
		err = goErr
	}
	return c, rustShim, err
}

type failure struct {
	id  string
	err error
}

// noSandbox says why no sandbox answers for the volume.
func (h *Handler) noSandbox(v *deferral.Volume, failures []failure) error {
	if len(failures) == 0 {
		return deferral.Errorf(deferral.NoSandbox, "volume %s: no Kata sandbox has used it yet%s", v.Target, h.trackerHint())
	}
	parts := make([]string, 0, min(len(failures), 4))
	for _, f := range failures[:min(len(failures), 4)] {
		parts = append(parts, "sandbox "+f.id+" "+h.whyDead(f))
	}
	kind := deferral.NoSandbox
	for _, f := range failures {
		if errors.Is(f.err, unix.EACCES) || errors.Is(f.err, unix.EPERM) || errors.Is(f.err, unix.EMFILE) {
			kind = deferral.Internal
		}
	}
	return deferral.Errorf(kind, "volume %s: no live Kata sandbox has it: %s%s: %w",
		v.Target, strings.Join(parts, "; "), h.trackerHint(), failures[0].err)
}

func (h *Handler) whyDead(f failure) string {
	switch {
	case errors.Is(f.err, unix.ENOENT):
		return "has no management socket (it has ended, or its VMM runs rootless below /run/user, which is not supported)"
	case errors.Is(f.err, unix.ECONNREFUSED):
		return "refuses connections on its management socket (its shim has died)"
	default:
		return "cannot be reached"
	}
}

func (h *Handler) trackerHint() string {
	if h.sandboxes != nil && h.sandboxes.Ready() {
		return ""
	}
	return " (the container runtime is not followed now, so that sandboxes of runtime-rs cannot be found: check its socket)"
}

// exchangeError classes a call that broke.
func exchangeError(ctx context.Context, v *deferral.Volume, id string, err error) error {
	if ctx.Err() != nil {
		return contextError(v, id, ctx.Err())
	}
	switch {
	case errors.Is(err, errTooMuch):
		return deferral.Errorf(deferral.Exhausted, "volume %s: Kata sandbox %s sent an answer of more than %d bytes, "+
			"which was not read on: %w", v.Target, id, maxBody, err)
	case errors.Is(err, errCutShort), errors.Is(err, errNotHTTP):
		return deferral.Errorf(deferral.Malformed, "volume %s: Kata sandbox %s sent an answer that cannot be read: %s",
			v.Target, id, guest.Printable(err.Error(), guest.MaxErrorText))
	case errors.Is(err, errHungUp):
		return deferral.Errorf(deferral.NoSandbox, "volume %s: Kata sandbox %s closed the connection without an answer; "+
			"it may be ending: %w", v.Target, id, err)
	default:
		return deferral.Errorf(deferral.Internal, "volume %s: Kata sandbox %s cannot be spoken to: %w", v.Target, id, err)
	}
}

// unsupported are the words by which shims and agents say that they cannot do
// what was asked: agents without the call, and confidential guests, whose
// policy forbids it.
var unsupported = []string{
	"resize_volume is not implemented", "unimplemented", "is not supported", "blocked by policy",
}

// statusError classes an answer that is not a success.
func statusError(v *deferral.Volume, what string, b binding, rep reply) error {
	text := guest.Printable(string(rep.body), guest.MaxErrorText)
	if text == "" {
		text = "no text"
	}
	kind, hint := deferral.Refused, ""
	lower := strings.ToLower(text)
	for _, words := range unsupported {
		if strings.Contains(lower, words) {
			kind = deferral.Unsupported
		}
	}
	if rep.status == 404 || rep.status == 405 || rep.status == 501 {
		kind, hint = deferral.Unsupported, "; this Kata release does not know the call"
	}
	return deferral.Errorf(kind, "volume %s: Kata sandbox %s (%s) answered %s with status %d: %s%s",
		v.Target, b.id, b.flavor, what, rep.status, text, hint)
}

// InUse names the live sandbox that has the volume. A volume that no sandbox
// ever had costs no system call while the watch runs.
func (h *Handler) InUse(ctx context.Context, v *deferral.Volume) (string, error) {
	if h.neverBound(v) {
		return "", nil
	}
	c, b, err := h.connect(ctx, v, true)
	if err == nil {
		c.close()
		return b.id, nil
	}
	switch deferral.KindOf(err) {
	case deferral.NoSandbox:
		return "", nil
	case deferral.Timeout:
		// Its queue is full: it hangs, and it lives.
		return b.id, nil
	default:
		return "", err
	}
}

func (h *Handler) neverBound(v *deferral.Volume) bool {
	h.mu.RLock()
	e, ok := h.entries[v.Key]
	never := ok && !e.bound
	h.mu.RUnlock()
	never = never && h.watch.Has(v.Key)
	if !never || h.sandboxes == nil || v.PodUID == "" {
		return never
	}
	return len(h.sandboxes.OfPod(v.PodUID)) == 0
}
