// Package qemu runs a virtual machine with QEMU and plugs disks into it. QEMU gets everything
// that it uses as open descriptors, so it needs access to no file: it runs as a user of its own,
// behind its seccomp filter, and is killed when this process ends.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config describes a machine.
type Config struct {
	// Program is QEMU. Virtiofsd serves the shared directory; tests of the guest alone have none.
	Program, Virtiofsd string
	// Kernel and Initramfs are booted with the arguments Append.
	Kernel, Initramfs, Append string
	// KVM is false for an emulated processor.
	KVM       bool
	MemoryMiB int
	CPUs      int
	// User is the user and group id of QEMU, which no other process should have.
	User uint32
	// Shared is the directory that the guest sees; Tag is its virtio-fs tag.
	Shared, Tag string
	// Port is the name of the guest's virtio-serial port.
	Port string
	// Dir is a directory that only root can enter, for a socket that Start removes again.
	Dir string
}

// Machine is a running virtual machine.
type Machine struct {
	// Agent is the host's end of the guest's port.
	Agent net.Conn
	// Console is the end of the output of the guest's kernel.
	Console *Tail

	qmp  *qmp
	qemu *child
	fs   *child
	sets int // how many descriptor sets QEMU has got

	mu    sync.Mutex // held to change disks, because Kill may run beside another call
	disks map[string]*Disk
}

// Start starts the machine, bounded by ctx. It does not wait for the guest to boot.
func Start(ctx context.Context, cfg Config) (*Machine, error) {
	m := &Machine{Console: new(Tail), disks: make(map[string]*Disk)}
	if err := m.start(ctx, cfg); err != nil {
		m.Kill()
		return nil, err
	}
	return m, nil
}

func (m *Machine) start(ctx context.Context, cfg Config) error {
	line := &commandLine{}
	defer line.close()
	if cfg.Virtiofsd != "" {
		fs, err := m.serveDirectory(cfg)
		if err != nil {
			return fmt.Errorf("%s: %w", cfg.Virtiofsd, err)
		}
		line.chardev("filesystem", fs)
		line.add("-device", "vhost-user-fs-pci,chardev=filesystem,tag="+cfg.Tag)
	}
	agent, err := line.pair("agent")
	if err != nil {
		return err
	}
	m.Agent = agent
	console, err := line.pair("console")
	if err != nil {
		return err
	}
	go func() { _, _ = io.Copy(m.Console, console); _ = console.Close() }()
	monitor, err := line.pair("monitor")
	if err != nil {
		return err
	}
	m.qmp = newQMP(monitor)
	if err := line.build(cfg); err != nil {
		return err
	}
	cmd := exec.Command(cfg.Program, line.args...) //nolint:gosec // by our own configuration
	cmd.ExtraFiles = line.files
	cmd.SysProcAttr = isolated(cfg.User, cfg.KVM)
	m.qemu, err = startChild(cmd)
	line.close() // now only QEMU has the other ends, so they close when it ends
	if err != nil {
		return fmt.Errorf("%s: %w", cfg.Program, err)
	}
	if err := m.qmp.execute(ctx, "qmp_capabilities", nil, nil); err != nil {
		return m.withExit(fmt.Errorf("%s does not answer: %w", cfg.Program, err))
	}
	return nil
}

// withExit adds how QEMU and virtiofsd ended, if they have: each ends without the other.
func (m *Machine) withExit(err error) error {
	select {
	case <-m.qemu.done:
	case <-time.After(time.Second):
		return err
	}
	if m.fs.hasEnded() {
		return fmt.Errorf("%w; it ended: %w; virtiofsd ended: %w", err, m.qemu.err, m.fs.err)
	}
	return fmt.Errorf("%w; it ended: %w", err, m.qemu.err)
}

// Done is closed when QEMU has ended.
func (m *Machine) Done() <-chan struct{} { return m.qemu.done }

// FSDone is closed when virtiofsd has ended: without it, every access to the shared directory hangs.
func (m *Machine) FSDone() <-chan struct{} { return m.fs.done }

// Err returns how QEMU ended.
func (m *Machine) Err() error { return m.qemu.err }

// Kill kills the machine, and waits until no process has its disks open.
func (m *Machine) Kill() {
	m.qemu.kill(math.MaxInt64)
	m.mu.Lock()
	for _, d := range m.disks {
		_ = d.file.Close()
	}
	m.mu.Unlock()
	m.fs.kill(killTimeout)
	if m.qmp != nil {
		_ = m.qmp.conn.Close()
	}
	if m.Agent != nil {
		_ = m.Agent.Close()
	}
}

// serveDirectory starts virtiofsd and returns QEMU's connection to it.
func (m *Machine) serveDirectory(cfg Config) (*os.File, error) {
	path := filepath.Join(cfg.Dir, "fs.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer func() { _ = listener.Close() }() // removes the path, too
	socket, err := listener.File()
	if err != nil {
		return nil, err
	}
	defer func() { _ = socket.Close() }()
	// Both virtiofsds take these: QEMU's own up to 7.2, and the one in Rust that followed it.
	cmd := exec.Command(cfg.Virtiofsd, "-f", "--fd=3", "--rlimit-nofile=0", "-o", //nolint:gosec // by our own configuration
		"source="+cfg.Shared+",sandbox=namespace,cache=auto,announce_submounts,xattr")
	cmd.ExtraFiles = []*os.File{socket}
	if m.fs, err = startChild(cmd); err != nil {
		return nil, err
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	return blocking(conn)
}

// blocking duplicates a connection as a blocking file for another program.
func blocking(conn *net.UnixConn) (*os.File, error) {
	file, err := conn.File()
	if err != nil {
		return nil, err
	}
	return file, unix.SetNonblock(int(file.Fd()), false)
}

// commandLine is QEMU's command line, with the files that it refers to.
type commandLine struct {
	args  []string
	files []*os.File
}

func (l *commandLine) add(args ...string) { l.args = append(l.args, args...) }

// file passes a file to QEMU and returns its descriptor there.
func (l *commandLine) file(f *os.File) int {
	l.files = append(l.files, f)
	return 2 + len(l.files)
}

func (l *commandLine) chardev(id string, f *os.File) {
	l.add("-chardev", "socket,id="+id+",fd="+strconv.Itoa(l.file(f)))
}

// pair creates a character device and returns the other end of its socket.
func (l *commandLine) pair(id string) (*net.UnixConn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	l.chardev(id, os.NewFile(uintptr(fds[1]), id))
	end := os.NewFile(uintptr(fds[0]), id)
	defer func() { _ = end.Close() }()
	conn, err := net.FileConn(end)
	if err != nil {
		return nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.New("not a unix socket")
	}
	return unixConn, nil
}

// open passes a file to QEMU and returns a path to the descriptor. QEMU need not have access
// to the directories above the file.
func (l *commandLine) open(path string) (string, error) {
	f, err := os.Open(path) //nolint:gosec // by our own configuration
	if err != nil {
		return "", err
	}
	name := "/proc/self/fd/" + strconv.Itoa(l.file(f))
	if info, err := f.Stat(); err != nil || info.Mode()&0o004 == 0 {
		return "", errors.Join(fmt.Errorf("%s cannot be read by QEMU's user: make it readable for all", path), err)
	}
	return name, nil
}

func (l *commandLine) close() {
	for _, f := range l.files {
		_ = f.Close()
	}
}

// isolated runs QEMU as an unprivileged user, without network or IPC.
func isolated(user uint32, kvm bool) *syscall.SysProcAttr {
	who := &syscall.Credential{Uid: user, Gid: user}
	var st unix.Stat_t
	if kvm && unix.Stat(kvmDevice, &st) == nil && st.Gid != 0 {
		who.Groups = []uint32{st.Gid} // which may open the device
	}
	return &syscall.SysProcAttr{Credential: who, Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC}
}

// baseArgs are the arguments of every QEMU that this package starts.
func baseArgs(kvm bool) []string {
	args := []string{
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-parallel", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
	}
	if kvm {
		return append(args, "-accel", "kvm", "-cpu", "host")
	}
	// Each feature of the processor slows emulation down: wide registers are saved at each task
	// switch, a fifth level of page tables is walked. So take x86-64-v2, a random number
	// generator for the boot, and the protection of the guest's kernel from user memory.
	return append(args, "-accel", "tcg,tb-size=128", "-cpu", "Nehalem,+rdrand,+smep,+smap")
}

func (l *commandLine) build(cfg Config) error {
	kernel, err := l.open(cfg.Kernel)
	if err != nil {
		return fmt.Errorf("the guest's kernel: %w", err)
	}
	initramfs, err := l.open(cfg.Initramfs)
	if err != nil {
		return fmt.Errorf("the guest's initramfs: %w", err)
	}
	memory := strconv.Itoa(cfg.MemoryMiB) + "M"
	l.add(baseArgs(cfg.KVM)...)
	l.add(
		"-machine", "pc,memory-backend=memory,vmport=off,hpet=off,dump-guest-core=off",
		"-object", "memory-backend-memfd,id=memory,share=on,size="+memory, "-m", memory, "-smp", strconv.Itoa(cfg.CPUs),
		"-kernel", kernel, "-initrd", initramfs, "-append", cfg.Append,
		"-mon", "chardev=monitor,mode=control", "-serial", "chardev:console",
		"-device", "virtio-serial-pci,max_ports=2", "-device", "virtserialport,chardev=agent,name="+cfg.Port,
	)
	return nil
}
