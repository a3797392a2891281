package vm

import (
	"context"
	"errors"
	"os"
	"testing"
	"testing/synctest"

	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// liar is a guest that says of a killed container that it is gone, or that it cannot be deleted.
type liar struct{ wire.ContainersService }

func (liar) SignalProcess(context.Context, *wire.SignalProcessRequest) (*wire.Empty, error) {
	return new(wire.Empty), nil
}

func (liar) DeleteProcess(context.Context, *wire.DeleteProcessRequest) (*wire.Empty, error) {
	return nil, errors.New("it is busy")
}

// TestAGuestThatKeepsAContainer is killed: a pod whose container does not end, or cannot be
// deleted, could never be deleted.
func TestAGuestThatKeepsAContainer(t *testing.T) { synctest.Test(t, guestKeepsAContainer) }

func guestKeepsAContainer(t *testing.T) {
	cfg := Config{StateDir: t.TempDir()} // whose hangTimeoutSeconds are over at once
	self, err := process.Of(os.Getpid())
	check.Must(t, err)
	check.Must(t, os.MkdirAll(string(cfg.sandbox("pod")), 0o700))
	check.Must(t, cfg.writeRecord(&record{ID: "stays", Sandbox: "pod", Process: self}))
	guest := &wire.Client{ContainersService: liar{}}
	s := &sandbox{cfg: cfg, id: "pod", dir: cfg.sandbox("pod"), share: cfg.sandbox("pod").share(), guest: guest, hung: make(chan error, 1)}
	s.volumes = &volumes{sandbox: "pod", guest: guest, byName: make(map[string]*attachedVolume)}
	c := &controlServer{ContainersService: guest, sandbox: s}
	_, err = c.SignalProcess(t.Context(), &wire.SignalProcessRequest{Process: &wire.Process{Container: "stays"}, Signal: 9})
	check.Must(t, err)
	err = <-s.hung
	check.That(t, errors.Is(err, errHung), "of a container that does not end: %v", err)
	_, err = c.DeleteProcess(t.Context(), &wire.DeleteProcessRequest{Process: &wire.Process{Container: "stays"}})
	check.That(t, err != nil, "the container was deleted")
	err = <-s.hung
	check.That(t, errors.Is(err, errHung), "of a container that cannot be deleted: %v", err)
}
