package kata

import (
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// isKept returns how many connections are kept; -1 means that none is ever.
func isKept(b *bench) int {
	k := &b.h.client.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conns == nil {
		return -1
	}
	return len(k.conns)
}

func TestConnectionsAreKept(t *testing.T) {
	b := newBench(t, kataemu.Go)
	check.Eventually(t, "connections are kept", func() bool { return isKept(b) == 0 })
	v := published(t, b, "a")
	shim := b.startShim(t, v, "sb1")
	k, socket := &b.h.client.kept, b.h.cfg.socketOf("sb1", goShim)
	take := func() *conn {
		t.Helper()
		b.stats(t, v)
		c := k.take(socket)
		if c == nil || isKept(b) != 0 {
			t.Fatal("no connection was kept")
		}
		return c
	}
	first := take()
	k.put(first)
	if again := take(); again != first {
		t.Error("the next call had another connection")
	}
	k.put(first)
	first.expiry.Reset(0)
	check.Eventually(t, "it is closed after its time", func() bool { return isKept(b) == 0 })

	// A shim may close a connection that we keep; the next call must not suffer.
	b.stats(t, v)
	shim.Kill(t)
	b.startShim(t, v, "sb1")
	b.stats(t, v)

	b.stop()
	b.stats(t, v)
	if n := isKept(b); n != -1 {
		t.Errorf("%d connections are kept without Run", n)
	}
}
