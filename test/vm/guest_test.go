//go:build system

package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	"github.com/crust-proxy/crust-proxy/reference/vm/initramfs"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

// guest is a machine with disks, without a runtime around it: a test is its host.
type guest struct {
	*wire.Client
	t       *testing.T
	qemu    *exec.Cmd
	console bytes.Buffer
	ended   chan struct{}
}

// rootVolume has the root directory of the containers.
var rootVolume = abi.DirName("/root")

// bootGuest boots a machine whose disks have their filesystem as serial.
func bootGuest(t *testing.T, disks map[string]string) *guest {
	t.Helper()
	kernel, archive, err := initramfs.Build(vmnode.Kernel(t), rig.Program(t, "crust-vm-agent"), t.TempDir())
	check.Must(t, err)
	socket := filepath.Join(t.TempDir(), "agent")
	listener := check.Value(net.Listen("unix", socket))(t)
	defer func() { _ = listener.Close() }()
	g := &guest{t: t, ended: make(chan struct{})}
	args := []string{
		"-machine", "pc", "-accel", "tcg", "-cpu", "Nehalem,+rdrand,+smep,+smap", "-m", "320", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-serial", "stdio", "-kernel", kernel, "-initrd", archive, "-append", initramfs.KernelArguments,
		"-chardev", "socket,id=agent,path=" + socket, "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent,name=" + wire.Port,
	}
	for serial, image := range disks {
		args = append(args, "-drive", "if=none,format=raw,cache=unsafe,id="+serial+",file="+image, "-device", "virtio-blk-pci,serial="+serial+",drive="+serial)
	}
	g.qemu = exec.Command("qemu-system-x86_64", args...)
	g.qemu.Stdout, g.qemu.Stderr = &g.console, &g.console
	check.Must(t, g.qemu.Start())
	go func() { _ = g.qemu.Wait(); close(g.ended) }()
	t.Cleanup(g.kill)
	g.Client = wire.NewClient(check.Value(listener.Accept())(t))
	return g
}

func (g *guest) kill() {
	_ = g.qemu.Process.Kill()
	<-g.ended
	_ = g.Close()
	if g.t.Failed() {
		g.t.Logf("console:\n%s", g.console.String())
	}
}

func (g *guest) add(serial, fs string, options ...string) (*wire.AddVolumeResponse, error) {
	return g.AddVolume(context.Background(), &wire.AddVolumeRequest{
		Volume: abi.DirName("/" + serial), Serial: serial, FsType: fs, Options: options,
	})
}

const (
	// guestDisk is larger than the filesystems on it are made.
	guestDisk = 512 * mib
	madeSize  = "311296k"
)

// image makes a filesystem that can grow.
func image(t *testing.T, fs string, args ...string) string {
	t.Helper()
	file := rig.Image(t, guestDisk)
	command := map[string][]string{
		"ext4": {"-q", file, madeSize}, "xfs": {"-q", "-d", "size=" + madeSize, file}, "btrfs": {"-q", "-b", madeSize, file},
	}[fs]
	rig.Command(t, "mkfs."+fs, append(args, command...)...)
	return file
}

// rootDir has busybox and a few files.
func rootDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, sub := range []string{"bin", "dev", "proc", "sys", "etc", "home/user", "run"} {
		check.Must(t, os.MkdirAll(dir+"/"+sub, 0o755)) //nolint:gosec // a root directory
	}
	busybox := check.Value(exec.LookPath("busybox"))(t)
	check.Must(t, os.WriteFile(dir+"/bin/busybox", check.Value(os.ReadFile(busybox))(t), 0o755)) //nolint:gosec // a program
	for _, name := range strings.Fields("sh cat id grep sleep ls stat hostname dd tty ps mount echo wc kill head tr umask nproc touch mkdir true") {
		check.Must(t, os.Symlink("busybox", dir+"/bin/"+name))
	}
	check.Must(t, os.WriteFile(dir+"/etc/passwd", []byte("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"), 0o644)) //nolint:gosec // as it is
	// A link that would lead a mount out of the root directory.
	check.Must(t, os.Symlink("/../../../run", dir+"/escape"))
	return dir
}

// spec is a container's, as containerd writes them.
func spec(script string) *specs.Spec {
	caps := []string{"CAP_CHOWN", "CAP_KILL", "CAP_SETUID"}
	return &specs.Spec{
		Root: &specs.Root{Path: "/run/crust/volumes/" + rootVolume},
		Process: &specs.Process{
			Args: []string{"sh", "-c", script}, Cwd: "/", Env: []string{"PATH=/bin"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: 123, Hard: 456}},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
			{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
			{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"}},
		},
		Linux: &specs.Linux{
			Namespaces:    []specs.LinuxNamespace{{Type: "pid"}, {Type: "mount"}, {Type: "cgroup"}, {Type: "network", Path: "/host"}, {Type: "uts", Path: "/host"}},
			MaskedPaths:   []string{"/proc/kcore", "/proc/fs", "/proc/no-such-file"},
			ReadonlyPaths: []string{"/proc/sys"},
		},
	}
}

func (g *guest) create(id string, is *specs.Spec, volumes ...*wire.VolumeMount) error {
	raw := check.Value(json.Marshal(is))(g.t)
	return check.Err(g.CreateContainer(context.Background(), &wire.CreateContainerRequest{Container: id, Spec: raw, Volumes: volumes}))
}

// run runs a container to its end and gives what it said.
func (g *guest) run(t *testing.T, id string, is *specs.Spec, volumes ...*wire.VolumeMount) (out string, code uint32) {
	t.Helper()
	check.Must(t, g.create(id, is, volumes...))
	g.start(t, id)
	process := &wire.Process{Container: id}
	out = g.output(t, process)
	ended := check.Value(g.WaitProcess(context.Background(), &wire.WaitProcessRequest{Process: process}))(t)
	g.remove(t, id)
	return out, ended.GetExitCode()
}

func (g *guest) start(t *testing.T, id string) {
	t.Helper()
	check.Must(t, check.Err(g.StartContainer(context.Background(), &wire.StartContainerRequest{Container: id})))
}

func (g *guest) remove(t *testing.T, id string) {
	t.Helper()
	check.Must(t, check.Err(g.DeleteProcess(context.Background(), &wire.DeleteProcessRequest{Process: &wire.Process{Container: id}})))
}

// output reads a process' output to its end, in small pieces.
func (g *guest) output(t *testing.T, process *wire.Process) string {
	t.Helper()
	var all strings.Builder
	for {
		said := check.Value(g.ReadOutput(context.Background(), &wire.ReadOutputRequest{Process: process, Stream: wire.Stream_STREAM_STDOUT, Max: 512}))(t)
		if len(said.GetData()) == 0 {
			return strings.ReplaceAll(all.String(), "\r", "")
		}
		all.Write(said.GetData())
	}
}

// TestGuest drives the agent in a machine of its own.
func TestGuest(t *testing.T) {
	rig.Need(t, "qemu-system-x86_64", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "busybox")
	began := time.Now()
	disks := map[string]string{"root": image(t, "ext4", "-d", rootDir(t))}
	for _, fs := range filesystems {
		disks[fs] = image(t, fs)
	}
	g := bootGuest(t, disks)
	check.Must(t, check.Until(10*time.Minute, time.Second, func() error {
		return check.Err(g.Ping(t.Context(), &wire.PingRequest{}))
	}))
	t.Logf("it was up after %v", time.Since(began))
	check.Must(t, check.Err(g.StartSandbox(t.Context(), &wire.StartSandboxRequest{Hostname: "pod-name", UnixNanos: time.Now().UnixNano(), Sysctls: map[string]string{"net.core.somaxconn": "1234"}})))
	check.Must(t, check.Err(g.add("root", "ext4")))
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) { g.tryVolume(t, fs) })
	}
	t.Run("container", g.tryContainer)
	t.Run("devices", g.tryDevices)
	t.Run("user", g.tryUser)
	t.Run("streams", g.tryStreams)
	t.Run("terminal", g.tryTerminal)
	t.Run("ends", g.tryEnds)
	t.Run("refused", g.tryRefused)
	// A freeze that comes after its caller has gone does not last.
	check.Fails(t, check.Err(g.FreezeVolume(check.Within(t, time.Millisecond), &wire.FreezeVolumeRequest{Volume: rootVolume, TimeoutMillis: 600000})))
	// A writer that nobody can kill is in the way of the end.
	check.Must(t, g.create("blocked", spec("while :; do echo x >>/file; done")))
	g.start(t, "blocked")
	check.Succeeds(t, "the volume is frozen", func() error {
		return check.Err(g.FreezeVolume(t.Context(), &wire.FreezeVolumeRequest{Volume: rootVolume, TimeoutMillis: 600000}))
	})
	began = time.Now()
	left, err := g.Shutdown(t.Context(), &wire.ShutdownRequest{}) // the machine may end before its answer is there
	t.Logf("it shut down in %v: %v", time.Since(began), err)
	check.That(t, len(left.GetErrors()) == 0 && (err == nil || status.Code(err) == codes.Unavailable), "when it shut down: %q, %v", left.GetErrors(), err)
	select {
	case <-g.ended:
	case <-time.After(5 * time.Minute):
		t.Error("the machine does not end")
	}
	for serial, image := range disks {
		rig.Fsck(t, strings.Replace(serial, "root", "ext4", 1), image)
	}
}

// tryVolume: mount, growth, statistics, and the end. The rest is demanded by crust-conformance.
func (g *guest) tryVolume(t *testing.T, fs string) {
	volume := abi.DirName("/" + fs)
	check.Code(t, check.Err(g.GetVolumeStats(t.Context(), &wire.GetVolumeStatsRequest{Volume: volume})), codes.NotFound)
	added := check.Value(g.add(fs, fs, "noatime", "_netdev"))(t)
	check.That(t, added.GetWarning() == "", "added: %v", added)
	check.Code(t, check.Err(g.add(fs, fs)), codes.AlreadyExists)
	stats := check.Value(g.GetVolumeStats(t.Context(), &wire.GetVolumeStatsRequest{Volume: volume}))(t)
	total := stats.GetUsage()[0].GetTotal()
	check.That(t, total >= 400*mib && total <= guestDisk && !stats.GetAbnormal(), "it did not grow to its disk, or is not well: %v", stats)
	check.Must(t, check.Err(g.ResizeVolume(t.Context(), &wire.ResizeVolumeRequest{Volume: volume, SizeBytes: guestDisk})))

	data := &wire.VolumeMount{Mount: 7, Volume: volume, SubPath: "a/b"}
	writer := spec("exec 2>&1; id -u >/data/file && cat /data/file && stat -c %a /data && echo done")
	writer.Mounts = append(writer.Mounts, specs.Mount{Destination: "/data", Options: []string{"rbind", "rprivate", "rw"}})
	out, code := g.run(t, "writer", writer, data)
	check.That(t, code == 0 && strings.HasSuffix(out, "done\n"), "a container with the volume: %d, %q", code, out)
	check.Must(t, check.Err(g.RemoveVolume(t.Context(), &wire.RemoveVolumeRequest{Volume: volume})))
	check.Code(t, check.Err(g.RemoveVolume(t.Context(), &wire.RemoveVolumeRequest{Volume: volume})), codes.NotFound)
	// Read-only, without a replay of its journal, and still there at the end of the machine.
	check.Must(t, check.Err(g.add(fs, fs, "ro", mountopt.NoReplay(fs))))
	reader := spec("cat /data/a/b/file; touch /data/x 2>&1")
	reader.Mounts = append(reader.Mounts, specs.Mount{Destination: "/data"})
	out, code = g.run(t, "reader", reader, &wire.VolumeMount{Mount: 7, Volume: volume})
	check.That(t, code != 0 && strings.HasPrefix(out, "0\n") && strings.Contains(out, "Read-only"), "a container with the volume read-only: %d, %q", code, out)
}

// tryContainer: what a container sees of its machine.
func (g *guest) tryContainer(t *testing.T) {
	is := spec(`exec 2>&1; hostname; cat /proc/sys/net/core/somaxconn; ps | wc -l; ls / | tr '\n' ' '; echo
wc -c </proc/kcore; ls /proc/fs | wc -l; echo 1 2>&1 >/proc/sys/vm/swappiness; touch /x 2>&1
ls -l /dev/null /dev/fd; echo x >/dev/null; grep -c . /proc/self/mountinfo; cat /proc/self/cgroup; ls /run /sys/fs/cgroup/memory.max; head -n1 /dev/users; echo >/dev/users; exit 7`)
	is.Root.Readonly = true
	is.Mounts = append(is.Mounts, specs.Mount{Destination: "/escape/data", Type: "tmpfs", Source: "tmpfs"},
		specs.Mount{Destination: "/dev/users", Source: is.Root.Path + "/etc/passwd", Options: []string{"rbind", "rprivate", "ro"}})
	limit := int64(64 << 20)
	is.Linux.Resources = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}}
	out, code := g.run(t, "look", is)
	for _, want := range []string{
		`^pod-name\n1234\n`, `\bbin .*proc run sys \n`, `\n0\n0\n`, `swappiness: Read-only file system`,
		`/x: Read-only file system`, `crw-rw-rw- .* 1, +3 .*/dev/null`, `/dev/fd -> /proc/self/fd`, `\n0::/\n`, `\ndata\n`, `/sys/fs/cgroup/memory.max`, `\nroot:x:0:0::/:/bin/sh\n`, `/dev/users: Read-only file system`,
	} {
		check.That(t, regexp.MustCompile(want).MatchString(out), "it did not say %s", want)
	}
	check.That(t, code == 7 && !t.Failed(), "it ended with %d and said:\n%s", code, out)
	hungry := spec("dd if=/dev/zero of=/dev/shm/x bs=1M count=60")
	small := int64(8 << 20)
	hungry.Linux.Resources = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &small}}
	check.Must(t, g.create("hungry", hungry))
	g.start(t, "hungry")
	ended := check.Value(g.WaitProcess(t.Context(), &wire.WaitProcessRequest{Process: &wire.Process{Container: "hungry"}}))(t)
	check.That(t, ended.GetOomKilled() && ended.GetExitCode() != 0, "without memory it ended with %v", ended)
	g.remove(t, "hungry")
}

// tryDevices: who may make any device opens those that the spec allows, and no disk of the pod.
func (g *guest) tryDevices(t *testing.T) {
	rules := func(allow bool, class string) []specs.LinuxDeviceCgroup {
		return []specs.LinuxDeviceCgroup{{Access: "rwm"}, {Allow: true, Type: "b", Access: "r"}, {Allow: allow, Type: class, Access: "rwm"}}
	}
	const made, denied = "made\n", "not permitted"
	for name, c := range map[string]struct {
		rules       []specs.LinuxDeviceCgroup
		read, write string
	}{
		"none":       {nil, denied, denied},
		"ordinary":   {rules(false, "a")[:1], denied, denied},
		"read":       {rules(true, "c"), "read", denied},
		"denied":     {rules(false, "b"), denied, denied},
		"privileged": {rules(true, ""), "read", "written"},
	} {
		is := spec(`exec 2>&1; IFS=: read major minor </sys/block/vda/dev; busybox mknod /dev/disk b $major $minor && echo made
(exec 3</dev/disk) && echo read; (exec 3<>/dev/disk) && echo written
echo >/dev/null && head -c1 /dev/urandom >/dev/zero && exec 4<>/dev/ptmx && cat /sys/fs/cgroup/cpu.max`)
		is.Process.Capabilities.Bounding = append(is.Process.Capabilities.Bounding, "CAP_MKNOD")
		is.Process.Capabilities.Permitted, is.Process.Capabilities.Effective = is.Process.Capabilities.Bounding, is.Process.Capabilities.Bounding
		quota, period := int64(90000), uint64(100000)
		is.Linux.Resources = &specs.LinuxResources{Devices: c.rules, CPU: &specs.LinuxCPU{Quota: &quota, Period: &period}}
		out, code := g.run(t, name, is)
		lines := strings.SplitAfter(out, "\n")
		check.That(t, code == 0 && len(lines) == 5 && lines[0] == made && strings.Contains(lines[1], c.read) && strings.Contains(lines[2], c.write) && lines[3] == "90000 100000\n",
			"%s: it ended with %d and said:\n%s", name, code, out)
	}
}

// tryUser: a process is who it is to be, with the rights that it is to have.
func (g *guest) tryUser(t *testing.T) {
	is := spec(`id; echo $HOME; umask; grep -e Cap -e NoNew /proc/self/status; ulimit -n; ulimit -Hn; echo out >/dev/stdout; cat /proc/self/oom_score_adj; pwd`)
	umask, score := uint32(0o027), 500
	is.Process.User = specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{5, 6}, Umask: &umask}
	is.Process.OOMScoreAdj = &score
	is.Process.Cwd = "/home/user"
	is.Process.Capabilities.Effective, is.Process.Capabilities.Ambient = []string{"CAP_CHOWN"}, []string{"CAP_KILL"}
	is.Process.Capabilities.Inheritable = []string{"CAP_KILL"}
	out, code := g.run(t, "user", is)
	for _, want := range []string{
		`uid=1000\(?.* gid=1001 groups=.*5.*6`, `\n/home/user\n0027\n`, `CapBnd:\s+00000000000000a1\n`, `CapAmb:\s+0000000000000020\n`,
		`CapEff:\s+0000000000000020\n`, `NoNewPrivs:\s+1\n123\n456\nout\n500\n/home/user\n`,
	} {
		check.That(t, regexp.MustCompile(want).MatchString(out), "it did not say %s", want)
	}
	check.That(t, code == 0 && !t.Failed(), "it ended with %d and said:\n%s", code, out)
	is = spec("grep Cap /proc/self/status")
	out, _ = g.run(t, "root", is)
	check.That(t, regexp.MustCompile(`CapEff:\s+00000000000000a1\n`).MatchString(out), "root has:\n%s", out)
}

// tryStreams: input, both outputs, a process beside, and signals.
func (g *guest) tryStreams(t *testing.T) {
	check.Must(t, g.create("cat", spec("cat; echo end >&2; trap 'exit 9' TERM; while :; do sleep 0.1; done")))
	process := &wire.Process{Container: "cat"}
	check.Code(t, check.Err(g.ExecProcess(t.Context(), &wire.ExecProcessRequest{Process: &wire.Process{Container: "cat", Exec: "early"}, Spec: []byte(`{"args":["true"]}`)})), codes.FailedPrecondition)
	g.start(t, "cat")
	check.Code(t, check.Err(g.StartContainer(t.Context(), &wire.StartContainerRequest{Container: "cat"})), codes.FailedPrecondition)
	const size = 300 << 10 // more than a pipe has
	sent := make(chan error)
	go func() {
		for left := size; left > 0; {
			took, err := g.WriteInput(context.Background(), &wire.WriteInputRequest{Process: process, Data: bytes.Repeat([]byte("x"), min(left, wire.MaxData))})
			if err != nil {
				sent <- err
				return
			}
			left -= int(took.GetWritten())
		}
		_, err := g.WriteInput(context.Background(), &wire.WriteInputRequest{Process: process})
		sent <- err
	}()
	got := 0
	for got < size {
		said, err := g.ReadOutput(t.Context(), &wire.ReadOutputRequest{Process: process, Stream: wire.Stream_STREAM_STDOUT, Max: wire.MaxData})
		if check.Must(t, err); len(said.GetData()) == 0 {
			break
		}
		got += len(said.GetData())
	}
	err := <-sent
	check.That(t, err == nil && got == size, "%d of %d bytes came back: %v", got, size, err)
	said := check.Value(g.ReadOutput(t.Context(), &wire.ReadOutputRequest{Process: process, Stream: wire.Stream_STREAM_STDERR, Max: 100}))(t)
	check.That(t, string(said.GetData()) == "end\n", "its errors are %q", said.GetData())
	g.tryExec(t)
	check.Must(t, check.Err(g.SignalProcess(t.Context(), &wire.SignalProcessRequest{Process: process, Signal: 15})))
	ended := check.Value(g.WaitProcess(t.Context(), &wire.WaitProcessRequest{Process: process}))(t)
	check.That(t, ended.GetExitCode() == 9, "it ended with %v", ended)
	check.Must(t, check.Err(g.SignalProcess(t.Context(), &wire.SignalProcessRequest{Process: process, Signal: 9})))
	g.remove(t, "cat")
	check.Code(t, check.Err(g.WaitProcess(t.Context(), &wire.WaitProcessRequest{Process: process})), codes.NotFound)
}

func (g *guest) tryExec(t *testing.T) {
	t.Helper()
	beside := &wire.Process{Container: "cat", Exec: "beside"}
	raw := check.Value(json.Marshal(&specs.Process{Args: []string{"sh", "-c", "ps | grep -q '[c]at; echo' && echo 1; id -u; cat /proc/self/cgroup; ulimit -n; ulimit -Hn; exit 3"}, Cwd: "/", Env: []string{"PATH=/bin"}, User: specs.User{UID: 1000}}))(t)
	check.Must(t, check.Err(g.ExecProcess(t.Context(), &wire.ExecProcessRequest{Process: beside, Spec: raw})))
	check.Code(t, check.Err(g.ExecProcess(t.Context(), &wire.ExecProcessRequest{Process: beside, Spec: raw})), codes.AlreadyExists)
	check.Equal(t, g.output(t, beside), "1\n1000\n0::/\n1024\n1048576\n", "a process beside says")
	ended := check.Value(g.WaitProcess(t.Context(), &wire.WaitProcessRequest{Process: beside}))(t)
	check.That(t, ended.GetExitCode() == 3, "it ended with %v", ended)
	check.Must(t, check.Err(g.DeleteProcess(t.Context(), &wire.DeleteProcessRequest{Process: beside})))
	_, err := g.ExecProcess(t.Context(), &wire.ExecProcessRequest{Process: beside, Spec: []byte(`{"args":["/no/such/program"],"cwd":"/"}`)})
	check.That(t, err != nil && strings.Contains(err.Error(), "/no/such/program"), "a program that is not there: %v", err)
}

// tryTerminal: a process has a terminal of its size.
func (g *guest) tryTerminal(t *testing.T) {
	is := spec("tty; read line; echo \"<$line>\"; busybox stty size")
	is.Process.Terminal = true
	check.Must(t, g.create("tty", is))
	g.start(t, "tty")
	process := &wire.Process{Container: "tty"}
	check.Must(t, check.Err(g.ResizeTerminal(t.Context(), &wire.ResizeTerminalRequest{Process: process, Columns: 111, Rows: 44})))
	check.Must(t, check.Err(g.WriteInput(t.Context(), &wire.WriteInputRequest{Process: process, Data: []byte("hello\n")})))
	out := g.output(t, process)
	// The echo of the input may come before the end of the first line.
	check.Says(t, "the terminal", out, "/dev/pts/0", "<hello>\n", "44 111\n")
	g.remove(t, "tty")
}

// tryEnds: a container goes with all its processes, whatever they do.
func (g *guest) tryEnds(t *testing.T) {
	check.Must(t, g.create("stubborn", spec("trap '' TERM; (trap '' TERM; sleep 1000) & sleep 1000")))
	g.start(t, "stubborn")
	waiting := make(chan uint32)
	go func() {
		ended, _ := g.WaitProcess(context.Background(), &wire.WaitProcessRequest{Process: &wire.Process{Container: "stubborn"}})
		waiting <- ended.GetExitCode()
	}()
	check.Must(t, check.Err(g.SignalProcess(t.Context(), &wire.SignalProcessRequest{Process: &wire.Process{Container: "stubborn"}, Signal: 9, All: true})))
	code := <-waiting
	check.That(t, code == 137, "it ended with %d", code)
	g.remove(t, "stubborn")
	g.remove(t, "stubborn")
	// One that was never started.
	check.Must(t, g.create("created", spec("true")))
	g.remove(t, "created")
}

// tryRefused: names are checked, and nothing is left of what is refused.
func (g *guest) tryRefused(t *testing.T) {
	check.Must(t, g.create("twice", spec("true")))
	check.Code(t, g.create("twice", spec("true")), codes.AlreadyExists)
	g.remove(t, "twice")
	check.Code(t, g.create("../x", spec("true")), codes.InvalidArgument)
	check.Code(t, g.create("none", spec("true"), &wire.VolumeMount{Volume: "nobody"}), codes.NotFound)
	g.remove(t, "none")
}
