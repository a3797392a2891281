package crust

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// question is one call, in the forms for a socket and for a program.
type question struct {
	method string // of the gRPC service
	words  []string
	in     proto.Message
	out    proto.Message
	// once is set if the call fails where the same was done before: the program must not repeat it.
	once bool
}

// askTime bounds a question, as the contract with authors of runtimes says.
const askTime = 30 * time.Second

type asker struct {
	cfg      *Config
	bindings *bindings
	cleaner  *cleaner
	conns    *conns
	programs *runner
}

// ask sends a question to the handler of the volume's live sandbox, and returns the sandbox's id.
func (a *asker) ask(ctx context.Context, v *volume.Volume, q *question) (id string, err error) {
	if err := ctx.Err(); err != nil {
		return "", guest.ContextError(v, "", err)
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	for again := false; ; again = true {
		seen, err := a.bindings.readDir(v)
		if err != nil {
			return "", err
		}
		if len(seen.ids) == 0 {
			a.bindings.table.Unbind(v.Key, seen.bound)
			return "", volume.Errorf(volume.NoSandbox, "volume %s: no sandbox has mounted it now", v.Target)
		}
		id := seen.ids[0]
		err = a.askOnce(ctx, v, id, seen, q)
		if volume.KindOf(err) == volume.NoSandbox && err != nil {
			switch another := a.cleaner.clear(v, seen); {
			case another && !again:
				continue // a new sandbox came while the old one was asked
			case another:
				return "", volume.Errorf(volume.Busy, "volume %s: its sandboxes change faster than they can be asked: try again", v.Target)
			}
			return "", err
		}
		if _, there := a.bindings.layout.identify(v.Key, id); there { // else it ended while it was asked
			a.bindings.bind(v.Key, id)
		}
		return id, err
	}
}

// askOnce prefers the socket, which costs no process, and falls back to the program if nobody serves the socket.
func (a *asker) askOnce(ctx context.Context, v *volume.Volume, id string, seen *dirSnapshot, q *question) error {
	unserved := seen.unread
	if seen.socket != "" {
		if unserved = a.askSocket(ctx, v, id, seen.socket, q); !errors.Is(unserved, errNobodyThere) {
			return unserved
		}
	}
	if seen.cli != "" {
		return a.askProgram(ctx, v, id, seen.cli, q)
	}
	if unserved == nil {
		return volume.Errorf(volume.Unsupported, "volume %s: the handler of sandbox %s left neither %s nor %s, "+
			"so that it cannot be asked", v.Target, id, abi.CLIName, abi.SocketName)
	}
	kind := volume.Internal
	if volume.KindOf(unserved) == volume.Denied {
		kind = volume.Denied
	}
	return volume.Errorf(kind, "volume %s: the handler of sandbox %s cannot be asked: %w", v.Target, id, unserved)
}

func oneLine(s string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return first
}

// thawForgotten asks every program: it is not known any more which one froze the volume.
func (a *asker) thawForgotten(ctx context.Context, v *volume.Volume, q *question, cause error) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	for _, program := range a.cfg.Programs {
		err := a.askProgram(ctx, v, "(none lives now)", program, q)
		if err == nil {
			return nil
		}
		if kind := volume.KindOf(err); kind == volume.InUse || kind == volume.Refused {
			cause = err
		}
	}
	return cause
}

func contextError(v *volume.Volume, sandbox string, err error) error {
	return guest.ContextError(v, "the handler of sandbox "+sandbox, err)
}
