// Package qemu runs a virtual machine by QEMU and plugs disks into it. Everything that
// QEMU gets it gets by descriptors, so that it needs no right to any file: it runs as
// a user of its own, behind its system call filter, and dies with us.
package qemu

import (
	"context"
	"errors"
	"fmt"
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

// Config is what the machine is made of.
type Config struct {
	// Program is QEMU, and Virtiofsd the server of the shared directory, or empty for none.
	Program, Virtiofsd string
	// Kernel and Initramfs are what it boots, with the arguments Append.
	Kernel, Initramfs, Append string
	// KVM is false to emulate the processor.
	KVM       bool
	MemoryMiB int
	CPUs      int
	// User is the user and the group that QEMU has; no process but it should have them.
	User uint32
	// Shared is the directory that the guest sees, by the name Tag.
	Shared, Tag string
	// Port is the name of the guest's port to us.
	Port string
	// Dir is a directory of root's, for a socket that is gone when Start returns.
	Dir string
}

// Machine is a running virtual machine.
type Machine struct {
	// Agent is the host's end of the guest's port.
	Agent net.Conn
	// Console is the last that the guest's kernel said.
	Console *Tail

	qmp  *qmp
	qemu *child
	fs   *child
	sets int // how many sets of descriptors QEMU was given

	mu    sync.Mutex // held to change disks, and while Kill closes them beside a call
	disks map[string]*Disk
}

// Start starts the machine. It is bounded by ctx; the guest boots meanwhile.
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
		line.pass("filesystem", fs)
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
	go m.Console.follow(console)
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
	cmd.SysProcAttr = alone(cfg.User, cfg.KVM)
	m.qemu, err = startChild(cmd)
	line.close() // only QEMU has them now: when it ends, its connections do
	if err != nil {
		return fmt.Errorf("%s: %w", cfg.Program, err)
	}
	if err := m.qmp.greet(ctx); err != nil {
		return m.because(fmt.Errorf("%s does not answer: %w", cfg.Program, err))
	}
	return nil
}

// because adds what QEMU said where it has ended.
func (m *Machine) because(err error) error {
	select {
	case <-m.qemu.done:
		return fmt.Errorf("%w; it ended: %w", err, m.qemu.err)
	case <-time.After(time.Second):
		return err
	}
}

// Done is closed when QEMU has ended.
func (m *Machine) Done() <-chan struct{} { return m.qemu.done }

// Err is how QEMU ended.
func (m *Machine) Err() error { return m.qemu.err }

// Kill ends the machine at once, and waits until nothing has its disks open.
func (m *Machine) Kill() {
	for _, c := range []*child{m.qemu, m.fs} {
		c.kill()
	}
	if m.qmp != nil {
		_ = m.qmp.conn.Close()
	}
	if m.Agent != nil {
		_ = m.Agent.Close()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.disks {
		_ = d.file.Close()
	}
}

// serveDirectory starts virtiofsd and gives QEMU's connection to it.
func (m *Machine) serveDirectory(cfg Config) (*os.File, error) {
	path := filepath.Join(cfg.Dir, "fs.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer func() { _ = listener.Close() }() // and the path goes
	socket, err := listener.File()
	if err != nil {
		return nil, err
	}
	defer func() { _ = socket.Close() }()
	cmd := exec.Command(cfg.Virtiofsd, "-f", "--fd=3", "--rlimit-nofile=0", "-o", //nolint:gosec // by our own configuration
		"source="+cfg.Shared+",sandbox=namespace,cache=auto,announce_submounts,xattr,log_level=err")
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

// blocking gives a connection as a file that another program can have.
func blocking(conn *net.UnixConn) (*os.File, error) {
	file, err := conn.File()
	if err != nil {
		return nil, err
	}
	return file, unix.SetNonblock(int(file.Fd()), false)
}

// kvmGroup is what it takes to open /dev/kvm.
func kvmGroup(kvm bool) []uint32 {
	var st unix.Stat_t
	if !kvm || unix.Stat(kvmDevice, &st) != nil || st.Gid == 0 {
		return nil
	}
	return []uint32{st.Gid}
}

// commandLine is QEMU's, with the files that it names.
type commandLine struct {
	args  []string
	files []*os.File
}

func (l *commandLine) add(args ...string) { l.args = append(l.args, args...) }

// file hands a file over, and gives the number that QEMU knows it by.
func (l *commandLine) file(f *os.File) int {
	l.files = append(l.files, f)
	return 2 + len(l.files)
}

// pass makes a character device of a connected socket.
func (l *commandLine) pass(id string, f *os.File) {
	l.add("-chardev", "socket,id="+id+",fd="+strconv.Itoa(l.file(f)))
}

// pair makes a character device and gives our end of it.
func (l *commandLine) pair(id string) (*net.UnixConn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	l.pass(id, os.NewFile(uintptr(fds[1]), id))
	ours := os.NewFile(uintptr(fds[0]), id)
	defer func() { _ = ours.Close() }()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.New("not a unix socket")
	}
	return unixConn, nil
}

// open names a file by its descriptor: QEMU may read it, and not what leads to it.
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

// alone runs QEMU as a user without rights and without a network: it gets all that it needs
// by descriptors.
func alone(user uint32, kvm bool) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: user, Gid: user, Groups: kvmGroup(kvm)},
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
	}
}

// confined are the arguments of any QEMU that we start.
func confined(kvm bool) []string {
	args := []string{
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-parallel", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
	}
	if kvm {
		return append(args, "-accel", "kvm", "-cpu", "host")
	}
	// An emulator pays for each feature of a processor: wide registers are saved at each switch,
	// a fifth level of page tables is read. These are what programs for x86-64-v2 need, random
	// numbers at boot, and what keeps the guest's kernel from running or reading users' memory.
	return append(args, "-accel", "tcg,tb-size=128", "-cpu", "Nehalem,+rdrand,+smep,+smap")
}

func (l *commandLine) build(cfg Config) error {
	kernel, err := l.open(cfg.Kernel)
	if err != nil {
		return fmt.Errorf("the guest's kernel: %w", err)
	}
	initramfs, err := l.open(cfg.Initramfs)
	if err != nil {
		return fmt.Errorf("the guest's first filesystem: %w", err)
	}
	memory := strconv.Itoa(cfg.MemoryMiB) + "M"
	l.add(confined(cfg.KVM)...)
	l.add(
		"-machine", "pc,memory-backend=memory,vmport=off,hpet=off",
		"-object", "memory-backend-memfd,id=memory,share=on,size="+memory, "-m", memory, "-smp", strconv.Itoa(cfg.CPUs),
		"-kernel", kernel, "-initrd", initramfs, "-append", cfg.Append,
		"-mon", "chardev=monitor,mode=control", "-serial", "chardev:console",
		"-device", "virtio-serial-pci,max_ports=2", "-device", "virtserialport,chardev=agent,name="+cfg.Port,
	)
	return nil
}
