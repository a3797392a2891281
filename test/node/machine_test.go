//go:build system

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

const (
	// bootTime and commandTime are for a machine whose processor is emulated, beside other tests.
	bootTime    = 10 * time.Minute
	commandTime = 11 * time.Minute
	// trialTime is for a kernel to find that it has no root filesystem, which takes a second with KVM and a quiet machine.
	trialTime = time.Minute
	// kernelArguments leave out of Debian what takes long and has nothing to do with pods.
	kernelArguments = initramfs.KernelArguments + " systemd.condition_needs_update=0 systemd.getty_auto=0 systemd.show_status=0" +
		" systemd.default_timeout_start_sec=600 systemd.default_device_timeout_sec=600" + // the processor is emulated
		" systemd.mask=getty.target systemd.mask=systemd-logind.service systemd.mask=timers.target systemd.mask=e2scrub_reap.service"
)

// machine is a virtual machine. Its disk outlives its processor, as in a real one.
type machine struct {
	t        *testing.T
	qemu     *rig.Process
	listener *net.UnixListener
	conn     *net.UnixConn
	results  *json.Decoder
	last     int // command
}

// install makes a machine of a suite of Debian's with the programs of a node on its disk, and boots it. QEMU may get further
// arguments.
func install(t *testing.T, suite string, files map[string]string, qemu ...string) *machine {
	t.Helper()
	rig.Need(t, "qemu-system-x86_64", "debootstrap", "mkfs.ext4")
	dir, kernel := t.TempDir(), vmnode.Kernel(t)
	program := filepath.Join(dir, "guest")
	check.Must(t, rig.BuildStatic(program, "test/node/guest"))
	image, archive, err := initramfs.Build(kernel, program, dir)
	check.Must(t, err)
	disk := filepath.Join(dir, "disk")
	files[program] = "/usr/local/bin/guest"
	makeDisk(t, disk, suite, kernel, files)
	second := rig.Image(t, 64<<20) // the device that is kept
	rig.Mkfs(t, "ext4", second)
	m, cpu := &machine{t: t}, processor(image)
	t.Logf("%s with %q", suite, cpu)
	m.listener = check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "port"), Net: "unix"}))(t)
	m.qemu = &rig.Process{Name: "QEMU", Program: "qemu-system-x86_64", LogFile: filepath.Join(dir, "console"), Args: append([]string{
		"-smp", "2", "-m", "2G", "-kernel", image, "-initrd", archive, "-append", kernelArguments,
		"-drive", "if=virtio,format=raw,cache=unsafe,discard=unmap,file=" + disk, "-drive", "if=virtio,format=raw,cache=unsafe,file=" + second, "-serial", "stdio",
		"-chardev", "socket,id=port,path=" + m.listener.Addr().String(),
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,name=" + Port,
	}, append(cpu, qemu...)...)}
	t.Cleanup(m.halt)
	m.boot()
	return m
}

// processor are QEMU's arguments for the processor, and for nothing else to be there: KVM's, where that boots a kernel. With
// nested virtualization it may open, run smaller guests, and hang. A kernel without a root filesystem panics at once.
func processor(kernel string) []string {
	bare := []string{"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"}
	byKVM := append(slices.Clone(bare), "-accel", "kvm", "-cpu", "host")
	ctx, cancel := context.WithTimeout(context.Background(), trialTime)
	defer cancel()
	trial := exec.CommandContext(ctx, "qemu-system-x86_64", append(byKVM, "-m", "256M", "-kernel", kernel, "-append", "panic=-1")...)
	trial.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if trial.Run() == nil {
		return byKVM
	}
	return append(bare, "-accel", "tcg,thread=multi", "-cpu", "Nehalem,+rdrand,+smep,+smap")
}

// makeDisk makes a disk with Debian, and on it the kernel's modules, containerd and further files: where they
// are, and where they shall be.
func makeDisk(t *testing.T, disk, suite, kernel string, files map[string]string) {
	t.Helper()
	debian, err := rig.Script("debian.sh", suite, "udev", "kmod", "iproute2", "e2fsprogs", "xfsprogs", "btrfs-progs", "busybox-static")
	if err != nil {
		rig.Missing(t, err.Error())
	}
	programs := check.Value(cri.Programs())(t)
	files[kernel+"/lib/modules"] = "/usr/lib/modules"
	for _, name := range []string{"containerd", "containerd-shim-runc-v2", "runc"} {
		files[filepath.Join(programs, name)] = "/usr/local/bin/"
	}
	files[filepath.Join(programs, "cni")], files["testdata/node/."] = "/opt/cni/bin", "/etc"
	ours, root := t.TempDir(), t.TempDir()
	for from, to := range files {
		to = ours + to
		check.Must(t, os.MkdirAll(filepath.Dir(to), 0o755))
		rig.Command(t, "cp", "-r", from, to)
	}
	check.Must(t, unix.Mount("overlay", root, "overlay", unix.MS_RDONLY, "lowerdir="+ours+":"+debian))
	t.Cleanup(func() { rig.UnmountAll(t, root) })
	check.Must(t, os.WriteFile(disk, nil, 0o600))
	check.Must(t, os.Truncate(disk, 4<<30))
	rig.Mkfs(t, "ext4", disk, "-d", root, "-E", "lazy_itable_init=1")
}

// boot turns the machine on, and waits until it runs commands and systemd has started what it shall, or failed to.
func (m *machine) boot() {
	m.t.Helper()
	start := time.Now()
	check.Must(m.t, m.qemu.Launch())
	check.Must(m.t, m.listener.SetDeadline(time.Now().Add(bootTime)))
	conn := check.Value(m.listener.AcceptUnix())(m.t)
	m.conn, m.results = conn, json.NewDecoder(conn)
	check.Must(m.t, conn.SetDeadline(time.Now().Add(bootTime)))
	check.Must(m.t, m.results.Decode(new(Result)))
	check.Must(m.t, check.Until(bootTime, time.Second, func() error {
		state, err := m.try("systemctl", "is-system-running", "--wait")
		if state == "degraded" {
			err = nil // what failed is the test's to say
		}
		return err
	}))
	m.t.Logf("the machine boots in %v", time.Since(start))
}

// reboot has systemd end everything, and turns the machine on again.
func (m *machine) reboot() {
	m.t.Helper()
	_, _ = m.try("systemctl", "reboot") // it may end what answers
	check.Must(m.t, check.Err(m.qemu.WaitEnd(commandTime)))
	m.qemu.Kill()
	check.Must(m.t, m.conn.Close())
	m.boot()
}

// halt turns the machine off without a word.
func (m *machine) halt() {
	if m.t.Failed() && m.qemu.Alive() && m.conn != nil {
		if out, err := m.try("journalctl", "--no-pager", "--boot", "--lines=150"); err == nil {
			m.t.Logf("journal:\n%s", out)
		}
	}
	m.qemu.Kill()
	if m.t.Failed() {
		m.t.Logf("console:\n%s", rig.Tail(m.qemu.Log()))
	}
	_ = m.listener.Close()
	if m.conn != nil {
		_ = m.conn.Close()
	}
}

// try runs a command in the machine.
func (m *machine) try(args ...string) (string, error) {
	m.last++
	check.Must(m.t, m.conn.SetDeadline(time.Now().Add(commandTime)))
	if err := json.NewEncoder(m.conn).Encode(Command{ID: m.last, Args: args}); err != nil {
		return "", err
	}
	var result Result
	for result.ID != m.last {
		if err := m.results.Decode(&result); err != nil {
			return "", fmt.Errorf("%q in the machine: %w", args, err)
		}
	}
	out := strings.TrimSpace(result.Output)
	if result.Code != 0 {
		return out, fmt.Errorf("%q in the machine ended with %d:\n%s", args, result.Code, out)
	}
	return out, nil
}

// run runs a command that must succeed.
func (m *machine) run(args ...string) string {
	m.t.Helper()
	return check.Value(m.try(args...))(m.t)
}

// sh runs a shell script that must succeed.
func (m *machine) sh(script string) string { m.t.Helper(); return m.run("bash", "-euc", script) }
