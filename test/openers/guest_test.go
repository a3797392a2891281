//go:build system

package openers

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// wantOfGuest is what the guest's program prints with Debian's kernel 6.1, in which the drivers of
// loop devices and device mapper are modules.
const wantOfGuest = `method: count
` + FirstOpenCounts + `a partition that nobody has: 0
a partition that a process has: 1
it is open in: "process N (\"init\")"
by scan, it is open in: "process N (\"init\")"
a mounted partition: 1
a mounted partition is open in: "this node's kernel: /dev/vda2 is mounted at /mnt; unmount it"
the disk of a mounted partition: 1
the module describes itself: true
a loop device: 0
its partition is a loop device: the device 7:1: false
its image is open in: "this node's kernel: the loop device /dev/loop0 lies on it, or on the same data; detach it"
with a writer of its image: 1
and opened itself: 2
and closed: 0
the partition below: 1
the partition below is open in: "this node's kernel: /dev/vda1 is part of dm-0"
a dm device: 0
a dm device, by scan, is open in: ""
a dm device that is mapped: 1
and by device mapper: 1
and by scan it is open in: "the kernel itself (a mount in another namespace, a loop or device-mapper device, swap), one of its partitions, a mapping, io_uring, or a descriptor that is being passed"
and unmapped: 0
`

// TestCountInAGuest has another kernel count, in an emulated machine: one that is a node's, and has real partitions.
func TestCountInAGuest(t *testing.T) {
	rig.Need(t, "qemu-system-x86_64")
	kernel, program := vmnode.Kernel(t), filepath.Join(t.TempDir(), "guest")
	check.Must(t, rig.BuildStatic(program, "test/openers/guest"))
	image, archive, err := initramfs.Build(kernel, program, t.TempDir())
	check.Must(t, err)
	cmd := exec.CommandContext(check.Within(t, 3*time.Minute), "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-accel", "tcg", "-cpu", "Nehalem,+rdrand,+smep,+smap", "-m", "320M", "-serial", "stdio",
		"-kernel", image, "-initrd", archive, "-append", initramfs.KernelArguments,
		"-drive", "if=virtio,format=raw,file="+guestDisk(t, kernel))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	start := time.Now()
	out := check.Value(cmd.CombinedOutput())(t)
	var facts strings.Builder
	pid := "none"
	for line := range strings.Lines(strings.ReplaceAll(string(out), "\r", "")) {
		switch first, rest, _ := strings.Cut(strings.TrimSpace(line), " "); {
		case first == "New":
			t.Logf("the machine ran %v; New %s", time.Since(start), rest)
		case first == "PID":
			pid = rest
		case !strings.HasPrefix(first, "["): // of the kernel itself
			facts.WriteString(strings.ReplaceAll(line, "process "+pid+" ", "process N "))
		}
	}
	check.Same(t, cmp.Diff(wantOfGuest, facts.String()), "-want +got")
}

// guestDisk makes a disk with two partitions. The second has a filesystem with modules on it.
func guestDisk(t *testing.T, kernel string) string {
	t.Helper()
	const sector, firstAt, size, secondAt = 512, 1 * mib, 2 * mib, 4 * mib
	modules := t.TempDir()
	for _, name := range []string{"loop.ko", "dm-mod.ko"} {
		found, err := filepath.Glob(kernel + "/lib/modules/*/kernel/drivers/*/" + name)
		check.Require(t, err == nil && len(found) == 1, "%s: %q, %v", name, found, err)
		check.Must(t, os.WriteFile(filepath.Join(modules, name), check.Value(os.ReadFile(found[0]))(t), 0o600))
	}
	files := rig.Image(t, 16*mib)
	rig.Mkfs(t, "ext4", files, "-d", modules)
	raw := check.Value(os.ReadFile(files))(t)
	disk := make([]byte, secondAt, secondAt+len(raw))
	entry := func(at, start, length int) {
		disk[at+4] = 0x83                                                  // Linux
		binary.LittleEndian.PutUint32(disk[at+8:], uint32(start/sector))   //nolint:gosec // small
		binary.LittleEndian.PutUint32(disk[at+12:], uint32(length/sector)) //nolint:gosec // small
	}
	entry(446, firstAt, size)
	entry(462, secondAt, len(raw))
	disk[510], disk[511] = 0x55, 0xaa
	path := filepath.Join(t.TempDir(), "disk")
	check.Must(t, os.WriteFile(path, append(disk, raw...), 0o600))
	return path
}
