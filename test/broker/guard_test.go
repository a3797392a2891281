//go:build system

package broker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/fuse"
)

const notice = "THIS-VOLUME-IS-NOT-MOUNTED-HERE"

// attackerEnv makes the test binary play root in a container with the default capabilities, on a guard.
const attackerEnv = "CRUST_TEST_ATTACK"

// defaultCaps are those that containerd gives to a container.
const defaultCaps = "+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap," +
	"+net_bind_service,+sys_chroot,+kill,+audit_write"

func TestGuardKeepsRootOfAContainerFromWriting(t *testing.T) {
	rig.Need(t, "setpriv")
	n := newNode(t)
	in := n.instruction("pod-1", rig.Disk(t, 16<<20, ""))
	n.stage(in)
	self := check.Value(os.Executable())(t)
	cmd := exec.Command("setpriv", "--bounding-set=-all,"+defaultCaps, "--", self, "-test.run=TestAttacker", "-test.v")
	cmd.Env = append(os.Environ(), attackerEnv+"="+in.Target)
	out, err := cmd.CombinedOutput()
	check.Require(t, err == nil && strings.Contains(string(out), "--- PASS: TestAttacker"), "the attack got through: %v\n%s", err, out)
	var st unix.Statfs_t
	check.Must(t, unix.Statfs(in.Target, &st))
	check.That(t, st.Blocks == 1 && st.Bfree == 0, "the guard has %d blocks, %d of them free", st.Blocks, st.Bfree)
	bound := t.TempDir() // as kubelet binds a subPath, and takes the bind away by itself, before or after
	check.Must(t, unix.Mount(filepath.Join(in.Target, "subpath"), bound, "", unix.MS_BIND, ""))
	n.unstage(in.Target)
	check.Empty(t, rig.MountPoints(in.Target), "under a bind of its subPath the guard stays")
	check.Must(t, unix.Unmount(bound, 0))
	n.noLeftovers()
}

// TestAttacker is run by the test above with a container's capabilities.
func TestAttacker(t *testing.T) {
	dir := os.Getenv(attackerEnv)
	if dir == "" {
		t.Log("run by TestGuardKeepsRootOfAContainerFromWriting only")
		return
	}
	file := filepath.Join(dir, notice)
	attempts := map[string]error{
		"remove the notice":    os.Remove(file),
		"truncate the notice":  os.Truncate(file, 0),
		"overwrite the notice": os.WriteFile(file, []byte("x"), 0o644),
		"rename the notice":    os.Rename(file, file+"2"),
		"rename over it":       renameOver(dir, file),
		"link the notice":      os.Link(file, file+"3"),
		"chmod the notice":     os.Chmod(file, 0o666),
		"clear its flag":       clearFlags(file),
		"mount something over": unix.Mount("tmpfs", dir, "tmpfs", 0, ""),
		"unmount the guard":    unix.Unmount(dir, unix.MNT_DETACH),
		"remount it larger":    unix.Mount("", dir, "", unix.MS_REMOUNT, "size=1g"),
		"make a device":        useDevice(dir),
	}
	for what, err := range attempts {
		check.That(t, err != nil, "%s succeeded", what)
	}
	check.Is(t, writeSome(filepath.Join(dir, "data")), unix.ENOSPC)                             // writing data
	check.Is(t, os.Symlink(strings.Repeat("x", 4000), filepath.Join(dir, "long")), unix.ENOSPC) // a symbolic link of a page
	check.NoError(t, os.Mkdir(filepath.Join(dir, "subpath"), 0o755), "kubelet's subPath directory")
	fillInodes(t, dir)
	check.Is(t, writeSome(filepath.Join(dir, "subpath", "data")), unix.ENOSPC) // writing after all inodes are taken
}

func renameOver(dir, file string) error {
	other := filepath.Join(dir, "other")
	if err := os.Mkdir(other, 0o755); err != nil {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, other, unix.AT_FDCWD, file, unix.RENAME_EXCHANGE)
}

func clearFlags(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)
}

// useDevice makes a device node, which the capabilities allow, and opens it, which the mount does not.
func useDevice(dir string) error {
	node := filepath.Join(dir, "null")
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		return err
	}
	_, err := os.ReadFile(node)
	return err
}

func writeSome(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write([]byte("data"))
	return errors.Join(err, f.Close())
}

func fillInodes(t *testing.T, dir string) {
	for i := range 1 << 20 {
		err := os.WriteFile(filepath.Join(dir, fmt.Sprint("f", i)), nil, 0o644)
		if errors.Is(err, unix.ENOSPC) {
			return
		}
		check.Must(t, err)
	}
	t.Error("a million files fit into the guard")
}

func TestUnstageLeavesForeignMountsAlone(t *testing.T) {
	n := parallelNode(t)
	in := n.instruction("pod-1", rig.Disk(t, 16<<20, ""))
	check.Must(t, os.MkdirAll(in.Target, 0o750))
	check.Must(t, unix.Mount("tmpfs", in.Target, "tmpfs", 0, ""))
	check.Must(t, os.WriteFile(filepath.Join(in.Target, "data"), []byte("precious"), 0o600))
	n.unstage(in.Target)
	raw, err := os.ReadFile(filepath.Join(in.Target, "data"))
	check.That(t, err == nil && string(raw) == "precious", "a foreign mount was touched: %q, %v", raw, err)
	check.Fails(t, check.Err(n.Defer(t.Context(), in)), "something else is mounted") // or it is staged over a foreign mount
	check.Must(t, unix.Unmount(in.Target, 0))
	n.noLeftovers()
}

// TestForeignMountThatHangs: to unpublish a volume that was never deferred does not wait for its server.
func TestForeignMountThatHangs(t *testing.T) {
	n := newNode(t)
	target, dir := n.instruction("pod-1", "").Target, t.TempDir()
	check.Must(t, fuse.Prepare(dir))
	server := check.Value(fuse.Mount(dir, nil))(t)
	t.Cleanup(func() { check.Must(t, server.End()) })
	check.Must(t, os.MkdirAll(target, 0o750))
	check.Must(t, unix.Mount(filepath.Dir(server.File), target, "", unix.MS_BIND, ""))
	t.Cleanup(func() { check.Must(t, unix.Unmount(target, unix.MNT_DETACH)) })
	server.Silent.Store(true)
	done := check.Begin(func() error { return check.Err(n.Release(context.Background(), target)) })
	select {
	case err := <-done:
		check.That(t, err == nil && len(rig.MountPoints(target)) == 1, "released with %v, mounted is %v", err, rig.MountPoints(target))
	case <-time.After(time.Minute):
		t.Error("it hangs")
	}
}

// TestMountTableIsFollowed: what is mounted is known again after each change.
func TestMountTableIsFollowed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "with a space#")
	check.Must(t, os.Mkdir(dir, 0o700))
	on := func(want bool) {
		t.Helper()
		time.Sleep(20 * time.Millisecond) // a poller that took the news of the change would have had it by now
		fsType, err := sys.TypeAt(filepath.Join(dir, "below"))
		check.That(t, err == nil && (fsType == "ramfs") == want, "of type %q, %v", fsType, err)
	}
	for range 3 {
		on(false)
		check.Must(t, unix.Mount("none", dir, "ramfs", 0, ""))
		on(true)
		check.Must(t, unix.Unmount(dir, 0))
	}
	on(false)
}
