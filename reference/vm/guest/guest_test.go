package guest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestOptionsOfMounts(t *testing.T) {
	for options, want := range map[string]mountOptions{
		"":                           {},
		"rbind,rprivate,rw":          {bind: true, recursiveBind: true, clear: unix.MOUNT_ATTR_RDONLY},
		"bind,rw,ro":                 {bind: true, set: unix.MOUNT_ATTR_RDONLY, clear: unix.MOUNT_ATTR_RDONLY},
		"rbind,rro":                  {bind: true, recursiveBind: true, recursiveAttr: true, set: unix.MOUNT_ATTR_RDONLY},
		"nosuid,nodev,noexec,mode=1": {set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC, rest: []string{"mode=1"}},
		"relatime,rslave":            {clear: unix.MOUNT_ATTR__ATIME},
		"idmap":                      {rest: []string{"idmap"}},
	} {
		var list []string
		if options != "" {
			list = strings.Split(options, ",")
		}
		got := parseMount(specs.Mount{Options: list})
		check.That(t, got.set == want.set && got.clear == want.clear && got.bind == want.bind && got.recursiveBind == want.recursiveBind &&
			got.recursiveAttr == want.recursiveAttr && slices.Equal(got.rest, want.rest), "%s: %+v", options, got)
	}
	check.That(t, parseMount(specs.Mount{Type: "bind"}).bind, "the type bind is no bind mount")
}

// TestMountPointsStayInTheRoot: links of an image never lead a mount out of its root.
func TestMountPointsStayInTheRoot(t *testing.T) {
	dir := t.TempDir()
	root, outside := dir+"/root", dir+"/outside"
	for _, made := range []string{root + "/var/run", root + "/etc", outside} {
		check.Must(t, os.MkdirAll(made, 0o700))
	}
	check.Must(t, os.WriteFile(root+"/etc/file", nil, 0o600))
	for link, to := range map[string]string{"up": "../../var", "absolute": "/var", "chain": "absolute/run", "loop": "loop", // and to nothing as yet:
		"dangling": "/nowhere/x", "var/run/out": "../../../outside/y", "etc/resolv.conf": "../run/stub/resolv.conf"} {
		check.Must(t, os.Symlink(to, filepath.Join(root, link)))
	}
	fd := check.Value(sys.OpenDir(root))(t)
	defer sys.CloseFD(fd)
	for name, want := range map[string]string{
		"/":          root,
		"/var/run/a": root + "/var/run/a", "/absolute/x/y": root + "/var/x/y", "/chain/b": root + "/var/run/b",
		"../../outside": root + "/outside", "/up/z": root + "/var/z", "/etc/file": root + "/etc/file",
		"/dangling/a": root + "/nowhere/x/a", "/chain/out/": root + "/outside/y", "/x/../v/./w": root + "/v/w",
	} {
		at := check.Value(openMountPoint(fd, name, true))(t)
		got, err := sys.PathOfFD(at)
		check.That(t, err == nil && got == want, "%s is placed at %s, %v", name, got, err)
		sys.CloseFD(at)
	}
	sys.CloseFD(check.Value(openMountPoint(fd, "/etc/resolv.conf", false))(t))
	info, err := os.Stat(root + "/run/stub/resolv.conf")
	check.That(t, err == nil && info.Mode().IsRegular(), "a place for a file: %v, %v", info, err)
	check.Fails(t, check.Err(openMountPoint(fd, "/loop/a", true)))
	left, err := os.ReadDir(outside)
	check.That(t, err == nil && len(left) == 0, "outside there is %v, %v", left, err)
}

func TestCapabilities(t *testing.T) {
	got, err := parseCapabilities(&specs.LinuxCapabilities{
		Bounding: []string{"CAP_CHOWN", "CAP_CHECKPOINT_RESTORE"}, Effective: []string{"CAP_SYS_ADMIN"}, Ambient: []string{"CAP_AUDIT_WRITE"},
	})
	check.Must(t, err)
	for set, want := range map[capability.CapType]string{
		capability.BOUNDING: "chown, checkpoint_restore", capability.EFFECTIVE: "sys_admin", capability.AMBIENT: "audit_write",
		capability.PERMITTED: "", capability.INHERITABLE: "",
	} {
		check.Equal(t, got.StringCap(set), want, "%v", set)
	}
	got, err = parseCapabilities(nil)
	check.That(t, err == nil && got.Empty(capability.BOUNDING) && got.Empty(capability.PERMITTED), "without any: %v, %v", got, err)
	_, err = parseCapabilities(&specs.LinuxCapabilities{Permitted: []string{"CAP_FLY"}})
	check.That(t, codeOf(err) == codes.Unimplemented, "one that is not known: %v", err)
}

func TestNamespaces(t *testing.T) {
	for _, c := range []struct {
		ns   specs.LinuxNamespace
		want uintptr
		code codes.Code
	}{
		{ns: specs.LinuxNamespace{Type: specs.IPCNamespace}, want: unix.CLONE_NEWIPC},
		{ns: specs.LinuxNamespace{Type: specs.IPCNamespace, Path: "/proc/1/ns/ipc"}},
		{ns: specs.LinuxNamespace{Type: specs.UTSNamespace}, want: unix.CLONE_NEWUTS},
		{ns: specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/run/netns/x"}},
		{ns: specs.LinuxNamespace{Type: specs.PIDNamespace}},
		{ns: specs.LinuxNamespace{Type: specs.PIDNamespace, Path: "/proc/1/ns/pid"}, code: codes.Unimplemented},
		{ns: specs.LinuxNamespace{Type: specs.UserNamespace}, code: codes.Unimplemented},
		{ns: specs.LinuxNamespace{Type: specs.TimeNamespace}, code: codes.Unimplemented},
	} {
		got, err := newNamespaces(&specs.Spec{Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{c.ns}}})
		check.That(t, (c.code == codes.OK || codeOf(err) == c.code) && (c.code != codes.OK || err == nil && got == c.want|unix.CLONE_NEWNS|unix.CLONE_NEWPID),
			"%+v: %#x, %v", c.ns, got, err)
	}
}

func TestCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{fmt.Errorf("volume: %w", errNotFound), codes.NotFound}, {unsupported("x"), codes.Unimplemented}, {fsops.ErrFrozen, codes.FailedPrecondition},
		{fmt.Errorf("grow: %w", fsops.ErrOutOfRange), codes.OutOfRange}, {errors.New("anything"), codes.Unknown},
	} {
		check.Equal(t, codeOf(c.err), c.want, "%v", c.err)
	}
	for status, want := range map[syscall.WaitStatus]uint32{0: 0, 7 << 8: 7, 255 << 8: 255, 9: 137, 11 | 0x80: 139} {
		check.Equal(t, exitCode(status), want, "%#x", status)
	}
}

// TestVolumeAsOnTheHost: what the host says of a volume is what a handler there reads.
func TestVolumeAsOnTheHost(t *testing.T) {
	group := uint32(4321)
	info := infoOf(&wire.AddVolumeRequest{FsType: "xfs", Options: []string{"noatime", "ro"}, FsGroup: &group, GroupPolicy: "OnRootMismatch"}, "/dev/vdb")
	gid, wanted, err := info.Group()
	check.That(t, err == nil && wanted && gid == group && info.GroupPolicy() == "OnRootMismatch" && info.ReadOnly() && info.Device == "/dev/vdb" && info.FSType == "xfs",
		"%+v: %d, %v, %v", info, gid, wanted, err)
	_, wanted, err = infoOf(&wire.AddVolumeRequest{}, "").Group()
	check.That(t, err == nil && !wanted, "without a group: %v, %v", wanted, err)
	v := newVolumes()
	for _, req := range []*wire.AddVolumeRequest{{Volume: "../etc", Serial: "x"}, {Volume: abi.DirName("/x")}, {}} {
		_, err = v.AddVolume(context.Background(), req)
		check.That(t, codeOf(err) == codes.InvalidArgument, "%v: %v", req, err)
	}
}

// TestProcessPipes: input and output of a process go by pipes with an end.
func TestProcessPipes(t *testing.T) {
	p := check.Value(newProcess(false))(t)
	p.cmd.Path, p.cmd.Args = "/bin/sh", []string{"sh", "-c", "cat; exit 4"}
	check.Must(t, p.start(&syscall.SysProcAttr{}))
	ctx := context.Background()
	for i := range 3 {
		n, err := p.write(ctx, []byte("line "+strconv.Itoa(i)))
		check.That(t, n == 6 && err == nil, "%d bytes were written: %v", n, err)
	}
	check.Must(t, errors.Join(p.closeInput(), p.closeInput()))
	_, err := p.write(ctx, []byte("x"))
	check.That(t, codeOf(err) == codes.FailedPrecondition, "written after the end: %v", err)
	var all []byte
	for {
		data := check.Value(p.read(ctx, &wire.ReadOutputRequest{Stream: wire.Stream_STREAM_STDOUT, Max: 4}))(t)
		if len(data) == 0 {
			break
		}
		all = append(all, data...)
	}
	code, err := p.wait(ctx)
	check.That(t, code == 4 && err == nil && string(all) == "line 0line 1line 2", "%q, %d, %v", all, code, err)
	check.Must(t, p.signal(unix.SIGTERM))
	p.end(ctx)
	_, err = p.read(ctx, &wire.ReadOutputRequest{Stream: wire.Stream_STREAM_STDERR, Max: 4})
	check.That(t, codeOf(err) == codes.NotFound, "read when it is forgotten: %v", err)
	_, err = p.read(ctx, &wire.ReadOutputRequest{Max: wire.MaxData + 1})
	check.That(t, codeOf(err) == codes.InvalidArgument, "a piece that is too large: %v", err)
}

// TestManySmallWrites are one piece of output, which comes at once at its end: the host's calls are numbered.
func TestManySmallWrites(t *testing.T) {
	for _, c := range []struct {
		reads int64
		pause time.Duration
		ends  bool
	}{{reads: 0}, {reads: 1 << 20, pause: 100 * time.Millisecond}, {reads: 1 << 21, ends: true}} {
		check.Eventually(t, fmt.Sprintf("they come as one: %+v", c), func() bool { // on a busy machine not at once
			p := check.Value(newProcess(false))(t)
			defer p.close()
			out, read := p.childEnds[2], make(chan string, 1)
			p.reads.Store(c.reads)
			check.Value(out.WriteString("a"))(t)
			go func() {
				data, err := p.read(t.Context(), &wire.ReadOutputRequest{Max: 100})
				read <- fmt.Sprint(string(data), err)
			}()
			for len(read) == 0 && check.Value(unix.IoctlGetInt(int(out.Fd()), unix.TIOCINQ))(t) > 0 { // until the first was read
				time.Sleep(time.Millisecond)
			}
			time.Sleep(c.pause)
			check.Value(out.WriteString("b"))(t)
			written := time.Now()
			if c.ends {
				check.Must(t, out.Close())
			}
			return <-read == "ab<nil>" && (!c.ends || time.Since(written) < 200*time.Millisecond)
		})
	}
}

// TestInputThatNobodyReads comes back after a while, with what was taken.
func TestInputThatNobodyReads(t *testing.T) {
	p := check.Value(newProcess(false))(t)
	p.cmd.Path, p.cmd.Args = "/bin/sh", []string{"sh", "-c", "sleep 100"}
	check.Must(t, p.start(&syscall.SysProcAttr{}))
	defer p.end(context.Background())
	n, err := p.write(context.Background(), make([]byte, wire.MaxData))
	check.That(t, err == nil && n != 0 && n != wire.MaxData, "%d bytes were taken: %v", n, err)
}

// openTerminal opens a terminal of this machine for a process, and its other end.
func openTerminal(t *testing.T, p *process) *os.File {
	t.Helper()
	number, err := p.openTerminal(os.Getpid())
	if errors.Is(err, os.ErrPermission) {
		check.NeedsRoot(t)
	}
	check.Must(t, err)
	other := check.Value(os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0))(t)
	t.Cleanup(func() { _ = other.Close() })
	return other
}

// TestTerminalBeforeItsProcess: the host attaches when the process is created, and loses nothing
// of what it does before the terminal is there.
func TestTerminalBeforeItsProcess(t *testing.T) {
	p := check.Value(newProcess(true))(t)
	defer p.end(t.Context())
	read := make(chan string, 1)
	go func() {
		data, err := p.read(t.Context(), &wire.ReadOutputRequest{Stream: wire.Stream_STREAM_STDOUT, Max: 100})
		read <- fmt.Sprintf("%q, %v", data, err)
	}()
	resized := check.Begin(func() error { return p.resize(t.Context(), 111, 44) })
	n, err := p.write(t.Context(), []byte("early"))
	check.That(t, n == 0 && err == nil && len(read) == 0 && len(resized) == 0, "there is no terminal, and %d bytes were written: %v", n, err)
	other := openTerminal(t, p)
	check.Must(t, <-resized)
	size, err := unix.IoctlGetWinsize(int(other.Fd()), unix.TIOCGWINSZ)
	check.That(t, err == nil && size.Col == 111 && size.Row == 44, "its size is %v, %v", size, err)
	check.Value(other.WriteString("output"))(t)
	got := <-read
	check.That(t, got == `"output", <nil>`, "it read %s", got)
	n, err = p.write(t.Context(), []byte("early\n"))
	check.That(t, n == 6 && err == nil, "%d bytes were written: %v", n, err)

	never := check.Value(newProcess(true))(t)
	never.cmd.Path = "/bin/true"
	check.Must(t, never.start(&syscall.SysProcAttr{}))
	_, err = never.read(t.Context(), &wire.ReadOutputRequest{Max: 100})
	check.That(t, codeOf(err) == codes.FailedPrecondition, "of a process that ended before: %v", err)
	never.end(t.Context())
}

// TestInputDoesNotEndOutput: they are one file, and the wait for one ends without the other.
func TestInputDoesNotEndOutput(t *testing.T) {
	p := check.Value(newProcess(true))(t)
	defer p.end(t.Context())
	other := openTerminal(t, p)
	const last = "the last line"
	read := check.Begin(func() error {
		for all := ""; !strings.Contains(all, last); {
			data, err := p.read(t.Context(), &wire.ReadOutputRequest{Stream: wire.Stream_STREAM_STDOUT, Max: 4096})
			if all += string(data); err != nil || len(data) == 0 {
				return fmt.Errorf("the output ended: %w", err)
			}
		}
		return nil
	})
	lines := []byte(strings.Repeat("x\n", wire.MaxData/2))
	for n := len(lines); n == len(lines); {
		n = check.Value(p.write(t.Context(), lines))(t) // until nobody takes it
	}
	check.Value(other.WriteString(last))(t)
	check.Must(t, <-read)
}

// TestContainerRemovedTwice at a time: its volumes lose one user.
func TestContainerRemovedTwice(t *testing.T) {
	vol := new(guestVolume)
	vol.users.Store(2)
	c := &container{cgroup: "crust-vm-no-such-group", mountNS: -1, volumes: []*guestVolume{vol}}
	cs := &containers{byID: map[string]*container{"c": c}}
	c.mu.Lock()
	removed := make(chan error)
	for range 2 {
		go func() { removed <- cs.remove(t.Context(), "c") }()
	}
	time.Sleep(100 * time.Millisecond) // until both have found it
	c.mu.Unlock()
	check.Must(t, errors.Join(<-removed, <-removed))
	check.Equal(t, vol.users.Load(), 1, "users of the volume")
}

func TestDeviceRuleThatIsNotKnown(t *testing.T) {
	_, err := deviceProgram([]specs.LinuxDeviceCgroup{{Type: "x", Access: "rwm"}})
	check.That(t, codeOf(err) == codes.InvalidArgument, "a device of the type x: %v", err)
}
