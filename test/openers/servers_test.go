//go:build system

package openers

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestServersOfDevices is about programs that have a device open because they are the device.
func TestServersOfDevices(t *testing.T) {
	server := filepath.Join(t.TempDir(), "rbd-nbd")
	raw, err := os.ReadFile("/bin/cat")
	check.Must(t, err)
	check.Must(t, os.WriteFile(server, raw, 0o700)) //nolint:gosec // a program
	f, s := counting(t), device(t)
	q := openers.Query{FD: s.fd, Own: 1, Servers: []string{"nbd-client", "rbd-nbd"}}
	start := func(program string) *rig.Holder { return rig.HoldBy(t, opening(t, program, "<>", s.path)) }

	first := start(server)
	wantUsers(t, f, q, "")
	wantUsers(t, f, openers.Query{FD: s.fd, Own: 1}, processName(first, "rbd-nbd"))
	second := start(server)
	wantUsers(t, f, q, "")

	// They are not passed over beside another program, or beside an opener that cannot be named.
	other := start("cat")
	wantUsers(t, f, q, processName(other, "cat"))
	other.End()
	wantUsers(t, f, q, "")
	mapping := rig.HoldBy(t, inRole("mapping", s.path))
	users, err := f.Await(t.Context(), q, 0)
	check.Must(t, err)
	check.That(t, names(users.Names, theKernel), "beside a mapping: %+v", users)
	mapping.End()
	first.End()
	second.End()
	wantUsers(t, f, openers.Query{FD: s.fd, Own: 1}, "")

	// A child that inherited the server's open file is another program.
	family := rig.HoldBy(t, exec.Command("sh", "-c", `exec 3<>"$0" 4<&0; cat <&4 >/dev/null & echo open; exec "$1"`, s.path, server))
	wantUsers(t, f, q, processName(family, "rbd-nbd"))
	family.End()
	wantUsers(t, f, q, "")

	// A script's name is not that of its program.
	script := filepath.Join(t.TempDir(), "rbd-nbd")
	check.Must(t, os.WriteFile(script, []byte("#!/bin/sh\necho open; read line\n"), 0o700)) //nolint:gosec // a program
	liar := rig.HoldBy(t, exec.Command("sh", "-c", `exec 3<>"$0"; exec "$1"`, s.path, script))
	wantUsers(t, f, q, "process ")
	liar.End()
	wantUsers(t, f, q, "")
}
