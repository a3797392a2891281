//go:build system

package qemu_test

import (
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

	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

const (
	mib  = int64(1) << 20
	size = 256 * mib
)

func TestFilesystemsOnAKernelWithAllCapabilities(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the kernel is one for amd64")
	}
	rig.Need(t, "qemu-system-x86_64", "mkfs.ext4", "e2fsck", "dumpe2fs")
	kernel, err := initramfs.FindKernel(vmnode.Kernel(t))
	check.Must(t, err)
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

// boot runs the machine until it turns itself off and gives what its console said.
func boot(t *testing.T, kernel initramfs.Kernel, disk string) string {
	t.Helper()
	program, archive := filepath.Join(t.TempDir(), "program"), filepath.Join(t.TempDir(), "initramfs")
	build := exec.Command("go", "build", "-o", program, "./init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build init: %v\n%s", err, out)
	}
	raw, err := initramfs.Archive(kernel, program, []initramfs.Modules{{Name: initramfs.Boot, Modules: []string{"virtio_pci", "virtio_blk"}}})
	check.Must(t, err)
	check.Must(t, os.WriteFile(archive, raw, 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	began := time.Now()
	machine := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "512", "-smp", "1", "-nodefaults", "-no-reboot",
		"-display", "none", "-serial", "stdio", "-kernel", kernel.Image, "-initrd", archive,
		"-append", initramfs.KernelArguments, "-drive", "file="+disk+",format=raw,if=virtio,cache=unsafe")
	console, err := machine.CombinedOutput()
	t.Logf("the machine ran for %v", time.Since(began).Round(time.Second))
	if err != nil {
		t.Fatalf("QEMU: %v\n%s", err, console)
	}
	return strings.ReplaceAll(string(console), "\r", "")
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}
