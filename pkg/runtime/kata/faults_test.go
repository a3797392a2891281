package kata

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestShimFaults(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b, v := publishedBench(t, flavor)
		shim := b.startShim(t, v, "sb1")
		for name, c := range map[string]struct {
			fault kataemu.Fault
			kind  volume.Kind
			text  string
		}{
			"hang":           {kataemu.Hang, volume.Timeout, "in time"},
			"500":            {kataemu.ServerError, volume.Refused, "the agent is"},
			"404":            {kataemu.NotFound, volume.Unsupported, "404"},
			"half body":      {kataemu.HalfBody, volume.Malformed, "ends before"},
			"1 GiB":          {kataemu.HugeBody, volume.Exhausted, "65536"},
			"1 GiB to come":  {kataemu.HugeLength, volume.Exhausted, "65536"},
			"wrong JSON":     {kataemu.WrongJSON, volume.Malformed, "cannot be read"},
			"negative":       {kataemu.Negative, volume.Absurd, "-1"},
			"hang-up":        {kataemu.CloseAtOnce, volume.NoSandbox, "without an answer"},
			"huge header":    {kataemu.HugeHeader, volume.Exhausted, "65536"},
			"endless chunks": {kataemu.EndlessChunks, volume.Exhausted, "65536"},
			"not HTTP":       {kataemu.NotHTTP, volume.Malformed, "not HTTP"},
		} {
			t.Run(name, func(t *testing.T) {
				ctx, cancel := t.Context(), func() {}
				if c.fault == kataemu.Hang {
					ctx, cancel = context.WithTimeout(ctx, time.Second)
				}
				defer cancel()
				shim.SetFault(c.fault)
				handlers.WantError(t, check.Err(b.h.Stats(ctx, v)), c.kind, v, "sb1", c.text)
				shim.SetFault(kataemu.NoFault)
				b.stats(t, v)
			})
		}
	}
}

func TestSocketMissingAndRefusing(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "no Kata sandbox has used it")
	shim := b.startShim(t, v, "sb1")
	check.Must(t, shim.Stop())
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "has no management socket")
	shim = b.startShim(t, v, "sb1")
	shim.Kill(t)
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "refuses connections")
}

// A full queue of connections is a sandbox that hangs, not one that is gone.
func TestFullBacklogIsHung(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
	fillBacklog(t, b.h.cfg.socketOf("sb1", goShim))
	ctx := check.Within(t, time.Second)
	handlers.WantError(t, check.Err(b.h.Stats(ctx, v)), volume.Timeout, v, "sb1")
	wantForgotten(t, b, v, "sb1")
	ctx = check.Within(t, time.Second)
	handlers.WantError(t, check.Err(b.h.Stats(dueContext{ctx}, v)), volume.Timeout, v, "sb1")
}

// dueContext has reached its deadline, and its own timer has not fired yet.
type dueContext struct{ context.Context }

func (dueContext) Deadline() (time.Time, bool) { return time.Unix(1, 0), true }

func TestTwoIDsOneDead(t *testing.T) {
	for _, dead := range []string{"aaa", "zzz"} {
		b, v := publishedBench(t, kataemu.Go)
		b.startShim(t, v, "mmm")
		// The dead one's file is the newer one, too.
		time.Sleep(5 * time.Millisecond)
		check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, dead))
		for range 2 {
			check.NoError(t, check.Err(b.h.Stats(t.Context(), v)), "beside the dead %s", dead)
		}
	}
}

func TestForeignSandboxIDIsNotBelieved(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v, other := published(t, b, "a"), published(t, b, "b")
	b.startShim(t, other, "other")
	check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "other"))
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v)
	for _, name := range []string{".hidden", "a b", strings.Repeat("x", 200), "ä"} {
		check.Must(t, os.WriteFile(filepath.Join(b.dir(v), name), nil, 0o600))
	}
	ids, err := b.h.bindings.candidates(v)
	check.That(t, err == nil && len(ids) == 0, "taken for sandboxes: %q", ids)
}

var oddDevices = []string{
	"/images/a+b", "/images/dev%20x", "/images/a b", "/images/a&path=/x", "/images/ä→😀", "/images/%", "/images/%2B+%252B",
	"/images/a?b#c", "/images/a;b", `/images/a"b\c`, "/images/a=b",
}

// Whichever unescaping a shim does the second time, the name survives.
func TestEscapeSurvivesBothUnescapers(t *testing.T) {
	for _, name := range oddDevices {
		once := check.Value(url.ParseQuery("path=" + escape(escape(name))))(t).Get("path")
		asPath, err1 := url.PathUnescape(once)
		asQuery, err2 := url.QueryUnescape(once)
		check.That(t, asPath == name && asQuery == name && err1 == nil && err2 == nil, "%q became %q and %q", name, asPath, asQuery)
	}
}

// fillBacklog listens, never accepts, and fills the queue of connections.
func fillBacklog(t *testing.T, socket string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(socket), 0o700))
	fd := check.Value(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))(t)
	t.Cleanup(func() { _ = unix.Close(fd) })
	check.Must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: socket}))
	check.Must(t, unix.Listen(fd, 0))
	for range 4 {
		if c, err := net.Dial("unix", socket); err == nil {
			t.Cleanup(func() { _ = c.Close() })
		}
	}
}

// What a shim says of its agent's end, or of its own, is that there is no sandbox to
// ask: kubelet asks again, and no alert follows.
func TestDyingAgent(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	b.startShim(t, v, "sb1")
	for _, text := range []string{
		"rpc error: code = Unknown desc = ttrpc: closed: unknown",
		"write unix @->hybrid.vsock: connection reset by peer", "context canceled", "Dead agent",
	} {
		err := statusError(v, "stats", shim{id: "sb1", flavor: goShim}, reply{status: 500, body: []byte(text)})
		handlers.WantError(t, err, volume.NoSandbox, v, "sb1", text, "ending")
	}
	handlers.WantError(t, exchangeError(t.Context(), v, "sb1", fmt.Errorf("%w: %w", errNotHTTP, unix.ECONNRESET)), volume.NoSandbox, v, "sb1", "ending")
}

// A sandbox that lives and does not have the volume is not one that has it, and not
// a failure: so it is between two containers, and where Kata did not take it.
func TestNotFoundInSandbox(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	shim := b.startShim(t, v, "sb1")
	check.Eventually(t, "bound", boundTo(b, v, "sb1")) // by the watch, whose event is not to come later
	b.stats(t, v)
	shim.Unmount()
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "not found in sandbox", "/data", "disable_block_device_use")
	check.That(t, boundTo(b, v, "")(), "bound to a sandbox that does not have the volume")
	for _, text := range []string{ // after a container's end: unmounted, and the disk is still attached
		`rpc error: code = Internal desc = Os { code: 2, kind: NotFound, message: "No such file or directory" }`,
		"rpc error: code = Internal desc = ENOENT: No such file or directory",
	} {
		shim.Mount(v.Device.Path, func() (unix.Statfs_t, error) { return unix.Statfs_t{}, errors.New(text) })
		handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "does not have it mounted now", "disable_block_device_use")
	}
	wantUse(t, b, v, "sb1") // which is no reason to give the device away
	b.destinations = nil
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "subPath")
	shim.Mount(v.Device.Path, kataemu.MountedAt("/"))
	_, err := b.h.Stats(t.Context(), v)
	check.That(t, err == nil && boundTo(b, v, "sb1")(), "not bound again: %v", err)
}

// A sandbox of runtime-rs is not known to have the pod's volume when it has merely
// started, and one that had it is named after its end.
func TestStartingSandboxIsNotBound(t *testing.T) {
	b, v := publishedBench(t, kataemu.Rust)
	shim := b.startShim(t, v, "sb1")
	check.That(t, boundTo(b, v, "")(), "bound before anybody asked")
	check.Value(b.h.Stats(t.Context(), v))(t)
	check.That(t, boundTo(b, v, "sb1")(), "not bound")
	b.h.guests.drop(v.Key)
	b.err = errors.New("no containerd")
	handlers.WantError(t, check.Err(b.h.Stats(t.Context(), v)), volume.NoSandbox, v, "sb1", "no containerd")
	b.err = nil
	check.That(t, boundTo(b, v, "sb1")(), "unbound by a container runtime that does not answer")
	check.Must(t, shim.Stop())
	b.remove("sb1")
	b.h.SandboxGone("sb1")
	b.Restart(t)
	b.publish(t, v)
	_, err := b.h.Stats(t.Context(), v)
	handlers.WantError(t, err, volume.NoSandbox, v, "sb1", "has ended")
	check.That(t, !strings.Contains(err.Error(), "yet"), "a sandbox had it: %v", err)
}

// TestConnectionsAreKept for kubelet's next question, and a shim that has gone does no harm by it.
func TestConnectionsAreKept(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		b := newBench(t, flavor)
		k := &b.h.client.kept
		held := func(but *conn) *conn {
			k.mu.Lock()
			defer k.mu.Unlock()
			for _, c := range k.conns {
				if c != but {
					return c
				}
			}
			return nil
		}
		check.Eventually(t, "connections are kept", func() bool { k.mu.Lock(); defer k.mu.Unlock(); return k.conns != nil })
		v := published(t, b, "a")
		shim := b.startShim(t, v, "sb1")
		b.stats(t, v)
		first := held(nil)
		b.stats(t, v)
		check.That(t, first != nil && held(first) == nil, "%v: the next call had another connection", flavor)

		shim.Kill(t)
		b.startShim(t, v, "sb2")
		b.stats(t, v)
		check.That(t, held(first) != nil, "%v: the shim that has gone is still asked", flavor)

		k.closeUntil(time.Now())
		check.That(t, held(nil) == nil, "%v: a connection is open after its time", flavor)
		b.stats(t, v)
		b.stop()
		b.stats(t, v)
		check.That(t, held(nil) == nil, "%v: a connection is kept without Run", flavor)
	}
}
