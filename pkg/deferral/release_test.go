package deferral

import (
	"context"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// freeRuntime is a handler that knows of no sandbox.
type freeRuntime struct{ retracted int }

func (*freeRuntime) Name() string                                            { return "kata" }
func (*freeRuntime) Abilities() Abilities                                    { return Abilities{} }
func (*freeRuntime) Check(*volume.Volume) error                              { return nil }
func (*freeRuntime) Publish(context.Context, *volume.Volume) (bool, error)   { return false, nil }
func (f *freeRuntime) Retract(context.Context, *volume.Volume) error         { f.retracted++; return nil }
func (*freeRuntime) InUse(context.Context, *volume.Volume) (string, error)   { return "", nil }
func (*freeRuntime) Orphans(func(volume.Key) bool) ([]*volume.Volume, error) { return nil, nil }

func newTestBroker(t *testing.T) (*Broker, *freeRuntime) {
	t.Helper()
	runtime := &freeRuntime{}
	b, err := NewBroker(Config{StateDir: t.TempDir(), Root: t.TempDir(), Handlers: []Projector{runtime}, DefaultHandler: "kata"})
	check.Must(t, err)
	t.Cleanup(b.Close)
	return b, runtime
}

// TestReleaseDoesNotRemoveWhatItDidNotAskAbout: a volume that was published while its
// release waited may have a sandbox by now.
func TestReleaseDoesNotRemoveWhatItDidNotAskAbout(t *testing.T) {
	b, runtime := newTestBroker(t)
	rec := testRecord(b.cfg.Root + "/mount")
	rec.Boot, rec.Device.Major = b.boot, 4095 // no such device
	unlock, err := b.locks.lock(t.Context(), rec.Key)
	check.Must(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := b.Release(t.Context(), rec.Target)
		ended <- err
	}()
	time.Sleep(100 * time.Millisecond) // it waits for the lock
	check.Must(t, b.store.put(rec))
	b.table.add(rec)
	unlock()
	if err := <-ended; volume.KindOf(err) != volume.Busy || err == nil || runtime.retracted > 0 {
		t.Errorf("released: %v, retracted %d times", err, runtime.retracted)
	}
	if known := b.table.get(rec.Key); known == nil || known.removing {
		t.Errorf("removed: %+v", known)
	}
	if _, err := b.Release(t.Context(), rec.Target); err != nil || b.table.has(rec.Key) {
		t.Errorf("repeated: %v", err)
	}
}
