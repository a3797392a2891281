package initramfs

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// kernelTree writes the tree of a kernel whose modules have their names as content.
func kernelTree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	modules := dir + "/lib/modules/6.1/"
	for _, file := range []string{"virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci", "virtio-blk", "virtio_console", "fuse", "virtiofs", "libcrc32c", "xfs"} {
		check.Must(t, os.MkdirAll(modules+"kernel", 0o700))
		check.Must(t, os.WriteFile(modules+"kernel/"+file+".ko", []byte(file), 0o600))
	}
	check.Must(t, os.MkdirAll(dir+"/boot", 0o700))
	check.Must(t, os.WriteFile(dir+"/boot/vmlinuz-6.1", nil, 0o600))
	check.Must(t, os.WriteFile(modules+"modules.builtin", []byte("kernel/fs/ext4/ext4.ko\n"), 0o600))
	// As depmod writes it: what others need stands last.
	check.Must(t, os.WriteFile(modules+"modules.dep", []byte(strings.Join([]string{
		"kernel/virtio.ko: kernel/virtio_ring.ko",
		"kernel/virtio_ring.ko:",
		"kernel/virtio_pci_modern_dev.ko:",
		"kernel/virtio_pci.ko: kernel/virtio_pci_modern_dev.ko kernel/virtio.ko kernel/virtio_ring.ko",
		"kernel/virtio-blk.ko: kernel/virtio.ko kernel/virtio_ring.ko",
		"kernel/virtio_console.ko: kernel/virtio.ko kernel/virtio_ring.ko",
		"kernel/fuse.ko:",
		"kernel/virtiofs.ko: kernel/virtio.ko kernel/virtio_ring.ko kernel/fuse.ko",
		"kernel/libcrc32c.ko:",
		"kernel/xfs.ko: kernel/libcrc32c.ko",
	}, "\n")), 0o600))
	return dir
}

// read takes an archive apart as the kernel does: by the numbers at their places.
func read(t *testing.T, raw []byte) (data map[string]string, modes map[string]int64) {
	t.Helper()
	data, modes = make(map[string]string), make(map[string]int64)
	aligned := func(n int64) int64 { return (n + 3) &^ 3 }
	for at := int64(0); ; {
		field := func(i int64) int64 {
			return check.Value(strconv.ParseInt(string(raw[at+6+8*i:at+14+8*i]), 16, 64))(t)
		}
		magic := string(raw[at : at+6])
		check.Require(t, magic == "070701", "at %d there is %q", at, magic)
		const mode, size, nameSize, header = 1, 6, 11, 110
		name := string(raw[at+header : at+header+field(nameSize)-1])
		begin := aligned(at + header + field(nameSize))
		if name == "TRAILER!!!" {
			return data, modes
		}
		data[name], modes[name] = string(raw[begin:begin+field(size)]), field(mode)
		at = aligned(begin + field(size))
	}
}

func TestArchive(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	check.Must(t, os.WriteFile(program, []byte("the program"), 0o600))
	_, path, err := Build(kernelTree(t), program, t.TempDir()+"/cache")
	check.Must(t, err)
	data, modes := read(t, check.Value(os.ReadFile(path))(t))
	for file, want := range map[string]string{
		"init": "the program", "modules/virtio-blk.ko": "virtio-blk", "modules/xfs.ko": "xfs",
		"modules/list": "boot virtio_ring.ko virtio.ko virtio_pci_modern_dev.ko virtio_pci.ko virtio-blk.ko virtio_console.ko\n" +
			"virtiofs fuse.ko virtio_ring.ko virtio.ko virtiofs.ko\next4\nxfs libcrc32c.ko xfs.ko\n",
	} {
		check.Same(t, cmp.Diff(want, data[file]), "%s", file)
	}
	for name, want := range map[string]int64{"init": 0o100755, "dev": 0o040755, "dev/console": 0o020600, "modules/list": 0o100644} {
		check.That(t, modes[name] == want, "%s has the mode %o", name, modes[name])
	}
}

func TestBuildOnce(t *testing.T) {
	program, dir, cache := filepath.Join(t.TempDir(), "program"), kernelTree(t), t.TempDir()+"/cache"
	build := func(content string) string {
		check.Must(t, os.WriteFile(program, []byte(content), 0o600))
		image, path, err := Build(dir, program, cache)
		check.Must(t, err)
		check.That(t, image == dir+"/boot/vmlinuz-6.1", "the kernel is %s", image)
		return path
	}
	first := build("one")
	before := check.Value(os.Stat(first))(t)
	check.Equal(t, build("one"), first, "the same is built twice")
	after, err := os.Stat(first)
	check.That(t, err == nil && os.SameFile(before, after), "the archive was replaced: %v", err)
	other := build("two")
	check.That(t, other != first, "another program has the same archive")
	// One that was cut off is made anew.
	check.Must(t, os.Truncate(first, 10))
	build("one")
	check.That(t, os.Truncate(first, before.Size()) == nil, "the archive is gone")
	all, err := os.ReadDir(cache)
	check.That(t, err == nil && len(all) == 2, "left: %v, %v", all, err)
	// What no build has used for long goes.
	killed, foreign := cache+"/.initramfs-1", cache+"/accel"
	past := time.Now().Add(-2 * unusedTime)
	for _, path := range []string{killed, foreign} {
		check.Must(t, os.WriteFile(path, nil, 0o600))
	}
	for _, path := range []string{killed, foreign, first, other} {
		check.Must(t, os.Chtimes(path, past, past))
	}
	build("one")
	left, err := filepath.Glob(cache + "/*")
	check.That(t, err == nil && slices.Equal(left, []string{foreign, first}), "left: %q, %v", left, err)
}

func TestKernelsThatWillNotDo(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	check.Must(t, os.WriteFile(program, nil, 0o600))
	two := kernelTree(t)
	check.Must(t, os.WriteFile(two+"/boot/vmlinuz-6.2", nil, 0o600))
	bare := kernelTree(t)
	check.Must(t, os.RemoveAll(bare+"/lib"))
	poor := kernelTree(t)
	check.Must(t, os.WriteFile(poor+"/lib/modules/6.1/modules.dep", []byte("kernel/virtio_ring.ko:\n"), 0o600))
	for want, dir := range map[string]string{"has 2 kernels": two, "has no modules": bare, "virtio_pci: the kernel has no such module": poor, "has 0 kernels": t.TempDir()} {
		_, _, err := Build(dir, program, t.TempDir())
		check.That(t, err != nil && strings.Contains(err.Error(), want), "%s: %v", want, err)
	}
	known := check.Value(kernel{modules: poor + "/lib/modules/6.1"}.table())(t)
	check.Is(t, check.Err(known.order([]string{"xfs"})), errNoModule) // a module that is not there
}
