//go:build system

package qemu_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

const (
	mib  = int64(1) << 20
	size = 256 * mib
)

// kernelOf names a directory with boot/vmlinuz-* and lib/modules, where there is one.
const kernelOf = "CRUST_TEST_KERNEL"

// drivers are what a cloud kernel needs for a disk of QEMU's, in the order of loading.
var drivers = []string{"virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk"}

func TestFilesystemsOnAKernelWithAllCapabilities(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the kernel is one for amd64")
	}
	rig.Need(t, "qemu-system-x86_64", "mkfs.ext4", "e2fsck", "dumpe2fs")
	kernel := kernelTree(t)
	disk := rig.Image(t, size)
	// Half of the device is for growing.
	run(t, "mkfs.ext4", "-q", "-b", "4096", disk, fmt.Sprint(size/2/1024)+"k")
	console := boot(t, kernel, disk)
	for _, want := range []string{`(?m)^GREW \d+ \d+ of ` + fmt.Sprint(size), `(?m)^GROUP `, `(?m)^FROZE for `, `(?m)^REPORT true ext4 has errors on record`, `(?m)^PASSED`} {
		if !regexp.MustCompile(want).MatchString(console) {
			t.Errorf("the machine did not say %s", want)
		}
	}
	t.Logf("console:\n%s", console)
	// That it was made to have an error is on record; nothing is to be mended.
	run(t, "e2fsck", "-f", "-n", disk)
	blocks := regexp.MustCompile(`Block count:\s+` + fmt.Sprint(size/4096) + `\b`)
	if sizes := run(t, "dumpe2fs", "-h", disk); !blocks.MatchString(sizes) {
		t.Errorf("the filesystem does not fill its device:\n%s", sizes)
	}
}

// kernelTree gives a directory with a kernel and its modules: Debian's for clouds.
func kernelTree(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv(kernelOf); dir != "" {
		return dir
	}
	rig.Need(t, "apt-get", "apt-cache", "dpkg-deb")
	out, _ := exec.Command("apt-cache", "depends", "linux-image-cloud-amd64").Output()
	name := regexp.MustCompile(`Depends: (linux-image-\S+-cloud-amd64)\b`).FindSubmatch(out)
	if name == nil {
		rig.Missing(t, "apt knows no linux-image-cloud-amd64; "+kernelOf+" may name a directory with a kernel")
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	fetch := exec.CommandContext(ctx, "apt-get", "download", "-q", string(name[1]))
	fetch.Dir = dir
	if out, err := fetch.CombinedOutput(); err != nil {
		rig.Missing(t, fmt.Sprintf("the kernel cannot be had: %v: %s", err, out))
	}
	found, err := filepath.Glob(dir + "/*.deb")
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	run(t, "dpkg-deb", "-x", found[0], dir)
	return dir
}

// boot runs the machine until it turns itself off and gives what its console said.
func boot(t *testing.T, kernel, disk string) string {
	t.Helper()
	image, err := filepath.Glob(kernel + "/boot/vmlinuz-*")
	if err != nil || len(image) != 1 {
		t.Fatalf("kernels below %s: %q, %v", kernel, image, err)
	}
	initramfs := filepath.Join(t.TempDir(), "initramfs")
	if err := os.WriteFile(initramfs, archive(t, kernel), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	began := time.Now()
	machine := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "512", "-smp", "1", "-nodefaults", "-no-reboot",
		"-display", "none", "-serial", "stdio", "-kernel", image[0], "-initrd", initramfs,
		"-append", "console=ttyS0 panic=-1 quiet", "-drive", "file="+disk+",format=raw,if=virtio,cache=unsafe")
	console, err := machine.CombinedOutput()
	t.Logf("the machine ran for %v", time.Since(began).Round(time.Second))
	if err != nil {
		t.Fatalf("QEMU: %v\n%s", err, console)
	}
	return strings.ReplaceAll(string(console), "\r", "")
}

// archive makes the machine's first filesystem.
func archive(t *testing.T, kernel string) []byte {
	t.Helper()
	program := filepath.Join(t.TempDir(), "init")
	build := exec.Command("go", "build", "-o", program, "./init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build init: %v\n%s", err, out)
	}
	var to cpio
	to.file("dev", 0o040755, nil)
	to.file("modules", 0o040755, nil)
	to.file("init", 0o100755, read(t, program))
	var list []string
	for _, driver := range drivers {
		found := strings.Fields(run(t, "find", kernel+"/lib/modules", "-name", driver+".ko"))
		if len(found) == 0 {
			continue // built into the kernel
		}
		to.file("modules/"+driver, 0o100644, read(t, found[0]))
		list = append(list, driver)
	}
	to.file("modules/list", 0o100644, []byte(strings.Join(list, "\n")))
	to.file("TRAILER!!!", 0, nil)
	return to.Bytes()
}

// cpio is an archive as the kernel unpacks it: the format newc.
type cpio struct {
	bytes.Buffer
	files int
}

func (c *cpio) file(name string, mode int, data []byte) {
	c.files++
	_, _ = fmt.Fprintf(c, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", c.files, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	c.WriteString(name + "\x00")
	c.pad()
	c.Write(data)
	c.pad()
}

func (c *cpio) pad() { c.Write(make([]byte, (4-c.Len()%4)%4)) }

func read(t *testing.T, path string) []byte {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}
