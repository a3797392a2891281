package handler

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestParseArgs(t *testing.T) {
	for line, want := range map[string]Invocation{
		"":          {},
		"--version": {},
		"list":      {Command: "list"},
		"--root /r --log /l --log-format json create --bundle /b --pid-file /p id": {
			Command: "create", Root: "/r", Log: "/l", LogFormat: "json", Bundle: "/b", Words: []string{"id"}},
		"--root=/r --log=/l --debug --systemd-cgroup create --bundle=/b id": {
			Command: "create", Root: "/r", Log: "/l", Bundle: "/b", Words: []string{"id"}},
		"--rootless auto create -b /b id":                   {Command: "create", Bundle: "/b", Words: []string{"id"}},
		"create --console-socket --bundle --bundle /b id":   {Command: "create", Bundle: "/b", Words: []string{"id"}},
		"create --no-pivot --preserve-fds 3 id --bundle /b": {Command: "create", Bundle: "/b", Words: []string{"id"}},
		"-root /r run -bundle /b id":                        {Command: "run", Root: "/r", Bundle: "/b", Words: []string{"id"}},
		"exec --process /p id sh -c create":                 {Command: "exec", Words: []string{"id", "sh", "-c", "create"}},
		"exec -d id sh --bundle /b":                         {Command: "exec", Words: []string{"id", "sh", "--bundle", "/b"}},
		"--root /r kill create 9":                           {Command: "kill", Root: "/r", Words: []string{"create", "9"}},
		"create --bundle":                                   {Command: "create"},
	} {
		got := ParseArgs(strings.Fields(line))
		check.That(t, got.Command == want.Command && got.Root == want.Root && got.Log == want.Log && got.LogFormat == want.LogFormat &&
			got.Bundle == want.Bundle && slices.Equal(got.Words, want.Words), "%q: %+v", line, got)
	}
	in := ParseArgs(strings.Fields("delete -f id --pid-file=/p"))
	check.That(t, in.Has("force", "f") && !in.Has("all", "a") && in.Option("pid-file", "") == "/p", "%+v", in)
}

// minuteFreezer are volumes that may be frozen for a minute.
type minuteFreezer struct{ Volumes }

func (minuteFreezer) Freeze(_ string, timeout time.Duration) error {
	if timeout <= 0 || timeout > time.Minute {
		return fsops.ErrOutOfRange
	}
	return nil
}

// A time that is too long for a duration is out of range, not a short one.
func TestFreezeForTooLong(t *testing.T) {
	cli := CLI{Name: "crust-test", Open: func() (Volumes, string, error) { return minuteFreezer{}, "", nil }}
	for seconds, want := range map[int64]int{
		0: abi.ExitOutOfRange, 60: abi.ExitOK, 61: abi.ExitOutOfRange,
		18446744074: abi.ExitOutOfRange, math.MaxInt64: abi.ExitOutOfRange,
	} {
		check.Equal(t, cli.Main([]string{abi.Freeze, "/target", fmt.Sprint(seconds)}, io.Discard, io.Discard), want, "%d s: exit status", seconds)
	}
}

// node is a /proc with processes that are added, and a program.
type node struct {
	t             *testing.T
	dir, proc     string
	program, link string
	last          int
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{t: t, dir: dir, proc: dir + "/proc", program: dir + "/crust-runc", link: dir + "/link"}
	check.Must(t, os.MkdirAll(n.proc+"/self/ns", 0o755))
	check.Must(t, os.Symlink("pid:[1]", n.proc+"/self/ns/pid"))
	check.Must(t, errors.Join(os.WriteFile(n.program, nil, 0o600), os.WriteFile(dir+"/runc", nil, 0o600), os.Symlink(n.program, n.link)))
	return n
}

func (n *node) process(cwd string, args ...string) {
	n.last++
	dir := fmt.Sprintf("%s/%d", n.proc, n.last)
	check.Must(n.t, os.MkdirAll(dir+"/ns", 0o755))
	check.Must(n.t, os.Symlink("pid:[1]", dir+"/ns/pid"))
	check.Must(n.t, os.WriteFile(dir+"/status", []byte("Name:\tx\nUid:\t0\t0\t0\t0\n"), 0o600))
	check.Must(n.t, os.WriteFile(dir+"/cmdline", []byte(strings.Join(args, "\x00")+"\x00"), 0o600))
	check.Must(n.t, os.Symlink(cwd, dir+"/cwd"))
}

// shim is one of containerd's, in its bundle.
func (n *node) shim(id, program string) {
	bundle := filepath.Join(n.dir, "bundles", id)
	check.Must(n.t, os.MkdirAll(bundle, 0o755))
	check.Must(n.t, os.WriteFile(bundle+"/options.json", []byte(`{"binary_name":"`+program+`","root":""}`), 0o600))
	n.process(bundle, "/usr/bin/containerd-shim-runc-v2", "-namespace", "k8s.io", "-id", id)
}

func TestRemovableUnderContainers(t *testing.T) {
	for name, c := range map[string]struct {
		add  func(n *node)
		says string
	}{
		"nobody":          {func(*node) {}, ""},
		"another program": {func(n *node) { n.shim("a", n.dir+"/runc") }, ""},
		"containerd":      {func(n *node) { n.shim("sandbox-a", n.program) }, `sandbox "sandbox-a" (shim 1)`},
		"by a link":       {func(n *node) { n.shim("sandbox-a", n.link) }, `sandbox "sandbox-a" (shim 1)`},
		"by its name":     {func(n *node) { n.shim("sandbox-a", "crust-runc") }, `sandbox "sandbox-a" (shim 1)`},
		"CRI-O":           {func(n *node) { n.process("/", "/usr/bin/conmon", "-b", "/b", "-c", "c1", "-r", n.program) }, `container "c1" (conmon 1)`},
		"podman":          {func(n *node) { n.process("/", "/usr/bin/conmon", "--runtime="+n.program, "--cid", "c2") }, `container "c2" (conmon 1)`},
		"CRI-O with runc": {func(n *node) { n.process("/", "/usr/bin/conmon", "-c", "c1", "-r", "/usr/bin/runc") }, ""},
		"an editor":       {func(n *node) { n.process("/", "vi", "-r", n.program) }, ""},
		"the program":     {func(n *node) { n.process("/", n.program, "crust", "removable") }, ""},
		"escapes":         {func(n *node) { n.shim("\x1b[2J", n.program) }, `sandbox "\x1b[2J" (shim 1)`},
		"a user": {func(n *node) {
			n.shim("sandbox-a", n.program)
			check.Must(n.t, os.WriteFile(n.proc+"/1/status", []byte("Name:\tx\nUid:\t1000\t0\t0\t0\n"), 0o600))
		}, ""},
		"a container": {func(n *node) {
			n.shim("sandbox-a", n.program)
			check.Must(n.t, errors.Join(os.Remove(n.proc+"/1/ns/pid"), os.Symlink("pid:[2]", n.proc+"/1/ns/pid")))
		}, ""},
		"nothing can be told of it": {func(n *node) {
			n.shim("sandbox-a", n.program)
			check.Must(n.t, errors.Join(os.Remove(n.proc+"/1/status"), os.Mkdir(n.proc+"/1/status", 0o700)))
			check.Must(n.t, errors.Join(os.RemoveAll(n.proc+"/1/ns"), os.WriteFile(n.proc+"/1/ns", nil, 0o600)))
		}, `sandbox "sandbox-a" (shim 1)`},
		"a kernel's thread": {func(n *node) { n.process("/") }, ""},
		"a pipe": {func(n *node) {
			check.Must(n.t, unix.Mkfifo(n.dir+"/options.json", 0o600))
			n.process(n.dir, "cat")
		}, ""},
		"many": {func(n *node) {
			for i := range mostUsers + 3 {
				n.shim(fmt.Sprintf("s%02d", i), n.program)
			}
		}, "and 3 more"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			c.add(n)
			err := unused(n.proc, n.program)
			check.That(t, (err == nil) == (c.says == "") && (err == nil || strings.Contains(err.Error(), c.says)), "it says %v, want %q", err, c.says)
		})
	}
	check.That(t, unused(filepath.Join(t.TempDir(), "proc"), "/usr/bin/crust-runc") != nil, "removable where nothing can be told")
	check.That(t, isOwn("/proc", "/proc/self", os.Getuid()), "a real process is not its user's") // files of /proc have no size
}

// TestReleasedVolumeIsNotOpened: while a runtime waited, another volume can have got the directory's name, and the device.
func TestReleasedVolumeIsNotOpened(t *testing.T) {
	root, key := t.TempDir(), abi.DirName("/a/target")
	publish := func() {
		check.Must(t, os.Mkdir(filepath.Join(root, key), 0o700))
		check.Must(t, os.WriteFile(filepath.Join(root, key, abi.InfoName), []byte(`{"volume-type":"block","device":"/dev/null","fstype":"ext4"}`), 0o600))
	}
	publish()
	dir := check.Value(abi.Open(root, key))(t)
	defer func() { _ = dir.Close() }()
	device := check.Value(os.Open("/dev/null"))(t)
	open := func(abi.Info) (int, error) { return unix.Dup(int(device.Fd())) }
	check.Must(t, unix.Close(check.Value(OpenPublished(dir, abi.Info{}, open))(t)))
	opened := -1
	_, err := OpenPublished(dir, abi.Info{}, func(info abi.Info) (int, error) {
		check.Must(t, os.RemoveAll(filepath.Join(root, key)))
		publish()
		fd, err := open(info)
		opened = fd
		return fd, err
	})
	check.Is(t, err, oci.ErrNoDirectory)
	check.Is(t, unix.Close(opened), unix.EBADF) // or the device stays in use
}
