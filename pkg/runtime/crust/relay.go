package crust

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// question is one call, as it is put to a socket and to a program.
type question struct {
	method string // of the gRPC service
	words  []string
	in     proto.Message
	out    proto.Message
}

// askTime bounds a question of a caller who gave no deadline.
const askTime = 30 * time.Second

// Stats asks the volume's live sandbox for its usage.
func (h *Handler) Stats(ctx context.Context, v *deferral.Volume) (deferral.Report, error) {
	out := &handlerv1.GetVolumeStatsResponse{}
	id, err := h.ask(ctx, v, &question{
		method: handlerv1.Handler_GetVolumeStats_FullMethodName, words: []string{abi.Stats, v.ResolvedTarget},
		in: &handlerv1.GetVolumeStatsRequest{TargetPath: v.ResolvedTarget}, out: out,
	})
	if err != nil {
		return deferral.Report{}, err
	}
	if said := out.GetSandboxId(); abi.IsSandboxID(said) {
		h.bind(v.Key, said)
	}
	return h.report(v, id, out)
}

// Resize asks the volume's live sandbox to grow its filesystem.
func (h *Handler) Resize(ctx context.Context, v *deferral.Volume, r deferral.Range) (int64, error) {
	if r.Required < 0 || r.Limit < 0 || (r.Limit > 0 && r.Required > r.Limit) {
		return 0, deferral.Errorf(deferral.Invalid, "volume %s: %d to %d bytes is not a range of sizes", v.Target, r.Required, r.Limit)
	}
	out := &handlerv1.ResizeVolumeResponse{}
	id, err := h.ask(ctx, v, &question{
		method: handlerv1.Handler_ResizeVolume_FullMethodName,
		words: []string{
			abi.Resize, v.ResolvedTarget, strconv.FormatInt(r.Required, 10), strconv.FormatInt(r.Limit, 10),
		},
		in: &handlerv1.ResizeVolumeRequest{
			TargetPath:    v.ResolvedTarget,
			CapacityRange: &runtimev1.CapacityRange{RequiredBytes: r.Required, LimitBytes: r.Limit},
		},
		out: out,
	})
	if err != nil {
		return 0, err
	}
	return h.newSize(v, id, r, out.GetCapacityBytes())
}

// Freeze holds all writes to the volume until Thaw, or until the timeout is over.
func (h *Handler) Freeze(ctx context.Context, v *deferral.Volume, timeout time.Duration) error {
	if timeout < time.Second {
		return deferral.Errorf(deferral.Invalid, "volume %s: a freeze of %v is too short: give a second or more", v.Target, timeout)
	}
	_, err := h.ask(ctx, v, &question{
		method: handlerv1.Handler_FreezeVolume_FullMethodName,
		words:  []string{abi.Freeze, v.ResolvedTarget, strconv.FormatInt(int64(timeout/time.Second), 10)},
		in: &handlerv1.FreezeVolumeRequest{
			TargetPath: v.ResolvedTarget, Timeout: durationpb.New(timeout.Truncate(time.Second)),
		},
		out: &handlerv1.FreezeVolumeResponse{},
	})
	return err
}

// Thaw lets writes to the volume go on, also where the sandbox that was told to
// hold them has ended: its filesystem stays frozen, and its handler can end that.
func (h *Handler) Thaw(ctx context.Context, v *deferral.Volume) error {
	q := &question{
		method: handlerv1.Handler_ThawVolume_FullMethodName, words: []string{abi.Thaw, v.ResolvedTarget},
		in: &handlerv1.ThawVolumeRequest{TargetPath: v.ResolvedTarget}, out: &handlerv1.ThawVolumeResponse{},
	}
	_, err := h.ask(ctx, v, q)
	if err == nil || deferral.KindOf(err) != deferral.NoSandbox {
		return err
	}
	return h.thawForgotten(ctx, v, q, err)
}

// thawForgotten asks every program: which one it was, nobody knows any more.
func (h *Handler) thawForgotten(ctx context.Context, v *deferral.Volume, q *question, cause error) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	for _, program := range h.cfg.Programs {
		err := h.askProgram(ctx, v, "that has ended", program, q)
		if err == nil {
			return nil
		}
		if deferral.KindOf(err) == deferral.Refused {
			cause = err
		}
	}
	return cause
}

// InUse names the live sandbox that has the volume. One that answers wrongly, or
// not in time, lives.
func (h *Handler) InUse(ctx context.Context, v *deferral.Volume) (string, error) {
	seen, err := h.look(v)
	if err != nil || len(seen.ids) == 0 {
		return "", err
	}
	bounded, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	_, err = h.Stats(bounded, v)
	switch deferral.KindOf(err) {
	case deferral.NoSandbox:
		return "", nil
	case deferral.Canceled:
		return "", err
	case deferral.Denied, deferral.Internal:
		if err != nil && h.isGone(seen.ids[0]) {
			return "", nil
		}
	}
	if b, bound := h.Binding(v); bound {
		return b.Sandbox, nil
	}
	return seen.ids[0], nil
}

// ask puts a question to whoever serves the volume's live sandbox, and tells which
// one that is.
func (h *Handler) ask(ctx context.Context, v *deferral.Volume, q *question) (id string, err error) {
	if err := ctx.Err(); err != nil {
		return "", contextError(v, "", err)
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	for again := false; ; again = true {
		seen, err := h.look(v)
		if err != nil {
			return "", err
		}
		if len(seen.ids) == 0 {
			h.bind(v.Key, "")
			return "", deferral.Errorf(deferral.NoSandbox, "volume %s: no sandbox has mounted it now", v.Target)
		}
		id := seen.ids[0]
		err = h.askOnce(ctx, v, id, seen, q)
		if deferral.KindOf(err) == deferral.NoSandbox && err != nil {
			if h.clear(v, seen) && !again {
				continue // a new sandbox came while the old one was asked for
			}
			return "", err
		}
		h.bind(v.Key, id)
		return id, err
	}
}

// askOnce prefers the socket, which costs no process, and turns to the program
// where nobody answers there.
func (h *Handler) askOnce(ctx context.Context, v *deferral.Volume, id string, seen *sight, q *question) error {
	var unserved error
	if seen.socket != "" {
		err := h.askSocket(ctx, v, id, seen.socket, q)
		if !errors.Is(err, errNobodyThere) {
			return err
		}
		unserved = err
	}
	if seen.cli != "" {
		return h.askProgram(ctx, v, id, seen.cli, q)
	}
	if unserved == nil {
		unserved = seen.unread
	}
	if unserved == nil {
		return deferral.Errorf(deferral.Unsupported, "volume %s: the handler of sandbox %s left neither %s nor %s, "+
			"so that it cannot be asked", v.Target, id, abi.CLIName, abi.SocketName)
	}
	return deferral.Errorf(kindOfUnserved(unserved), "volume %s: the handler of sandbox %s cannot be asked: %w", v.Target, id, unserved)
}

func kindOfUnserved(err error) deferral.Kind {
	if deferral.KindOf(err) == deferral.Denied {
		return deferral.Denied
	}
	return deferral.Internal
}

// oneLine is the first line of what a handler says to people.
func oneLine(s string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return first
}
