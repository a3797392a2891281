package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// node is a directory that stands for a node: the directories of volumes, targets,
// and a list of mounts that says of the real mount below it what a test wants.
type node struct {
	t    *testing.T
	dir  string
	cfg  Config
	real int // the id of the mount that dir lies on
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{t: t, dir: dir, cfg: Config{Root: dir + "/crust", MountInfo: dir + "/mountinfo"}}
	n.must(os.Mkdir(n.cfg.Root, 0o700))
	n.mounts()
	file, err := os.Open(dir)
	n.must(err)
	defer func() { _ = file.Close() }()
	n.real, _, err = mountOf(int(file.Fd()))
	n.must(err)
	return n
}

func (n *node) must(err error) {
	n.t.Helper()
	check.Must(n.t, err)
}

func (n *node) mounts(lines ...string) {
	n.t.Helper()
	n.must(os.WriteFile(n.cfg.MountInfo, []byte(strings.Join(lines, "\n")+"\n"), 0o600))
}

// publish makes a target and its volume's directory.
func (n *node) publish(name, pod string) (target string) {
	n.t.Helper()
	target = filepath.Join(n.dir, name)
	n.must(os.MkdirAll(target, 0o700))
	dir := filepath.Join(n.cfg.Root, abi.DirName(target))
	n.must(os.Mkdir(dir, 0o700))
	n.must(os.WriteFile(dir+"/"+abi.InfoName, fmt.Appendf(nil,
		`{"volume-type":"block","device":"/dev/x","fstype":"ext4","metadata":{"crust.targetPath":%q,"crust.podUID":%q}}`, target, pod), 0o600))
	return target
}

func bind(source string, options ...string) *specs.Spec {
	return &specs.Spec{Mounts: []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc"},
		{Destination: "/data", Type: "bind", Source: source, Options: append(options, "rbind")},
	}}
}

// find looks for exactly one volume.
func (n *node) find(spec *specs.Spec, pod string) *Mount {
	n.t.Helper()
	found := check.Value(Find(n.cfg, spec, pod))(n.t)
	check.Require(n.t, len(found) == 1, "found %d", len(found))
	n.t.Cleanup(func() { _ = found[0].Close() })
	return found[0]
}

func (n *node) refused(spec *specs.Spec, pod string, want error) {
	n.t.Helper()
	found, err := Find(n.cfg, spec, pod)
	check.Require(n.t, err != nil && found == nil && (want == nil || errors.Is(err, want)), "found %d, error %v, want %v", len(found), err, want)
}

func TestByPath(t *testing.T) {
	n := newNode(t)
	target := n.publish("a", "pod")
	n.must(os.MkdirAll(target+"/b/c", 0o700))
	m := n.find(bind(target, "ro"), "pod")
	check.Require(t, m.Index == 1 && m.Destination == "/data" && m.Sub == "" && m.ReadOnly && !m.Guarded && m.Volume == abi.DirName(target), "%+v", m)
	m = n.find(bind(target+"/b/c"), "pod")
	check.Require(t, m.Sub == "b/c" && !m.ReadOnly, "%+v", m)
	m = n.find(bind(target, "rbind", "rro"), "pod")
	check.Require(t, m.ReadOnly, "%+v", m)
}

// Who could not look has not seen that it is no volume.
func TestOutOfDescriptors(t *testing.T) {
	n := newNode(t)
	spec := bind(n.publish("a", "pod"))
	check.WithoutDescriptors(t, func() {
		m, err := n.cfg.findOne(nil, spec.Mounts[1], "pod")
		check.That(t, m == nil && errors.Is(err, unix.EMFILE), "%+v, %v", m, err)
	})
}

func TestByPathThroughALink(t *testing.T) {
	n := newNode(t)
	target := n.publish("a", "pod")
	n.must(os.Symlink(n.dir, n.dir+"/link"))
	m := n.find(bind(n.dir+"/link/a"), "pod")
	check.Require(t, m.Volume == abi.DirName(target) && m.Sub == "", "%+v", m)
}

func TestTheLongestBeginningCounts(t *testing.T) {
	n := newNode(t)
	n.publish("a", "pod")
	inner := n.publish("a/b", "pod")
	n.must(os.Mkdir(inner+"/c", 0o700))
	m := n.find(bind(inner+"/c"), "pod")
	check.Require(t, m.Volume == abi.DirName(inner) && m.Sub == "c", "%+v", m)
	// Not by characters: ab is not below a.
	n.must(os.Mkdir(n.dir+"/ab", 0o700))
	found, err := Find(n.cfg, bind(n.dir+"/ab"), "pod")
	check.Require(t, err == nil && len(found) == 0, "%v, %v", found, err)
}

func TestByGuard(t *testing.T) {
	n := newNode(t)
	target := n.publish("a", "pod")
	other := filepath.Join(n.dir, "elsewhere", "deep")
	n.must(os.MkdirAll(other, 0o700))
	line := func(root, point string) string {
		return fmt.Sprintf("%d 1 0:50 %s %s rw,nosuid shared:7 - tmpfs crust:%s rw,size=4k", n.real, root, point, abi.DirName(target))
	}
	n.mounts("1 0 8:1 / / rw - ext4 /dev/sda1 rw", "this is no line of the kernel", line("/sub", n.dir+"/elsewhere"))
	m := n.find(bind(other), "pod")
	check.Require(t, m.Guarded && m.Sub == "sub/deep" && m.Volume == abi.DirName(target), "%+v", m)
	n.mounts(line(`/a\040b`, n.dir))
	m = n.find(bind(other), "pod")
	check.Require(t, m.Sub == "a b/elsewhere/deep", "%+v", m)
	n.mounts(line("/sub//deleted", n.dir))
	n.refused(bind(other), "pod", nil)
	n.mounts(line("/", "/not/where/it/is"))
	n.refused(bind(other), "pod", nil)
}

func TestGuardWithoutDirectory(t *testing.T) {
	n := newNode(t)
	n.mounts(fmt.Sprintf("%d 1 0:50 / %s rw - tmpfs crust:%s rw", n.real, n.dir, strings.Repeat("0", 64)))
	n.must(os.Mkdir(n.dir+"/a", 0o700))
	n.refused(bind(n.dir+"/a"), "pod", ErrNoDirectory)
}

func TestOthersAreLeftAlone(t *testing.T) {
	n := newNode(t)
	n.publish("a", "pod")
	for name, m := range map[string]specs.Mount{
		"another directory":   {Type: "bind", Source: n.dir, Options: []string{"rbind"}},
		"nothing there":       {Type: "bind", Source: n.dir + "/none", Options: []string{"rbind"}},
		"no bind":             {Type: "tmpfs", Source: n.dir + "/a"},
		"no path":             {Type: "bind", Source: "a", Options: []string{"rbind"}},
		"a tmpfs like a name": {Type: "tmpfs", Source: "crust:" + strings.Repeat("0", 64)},
	} {
		found, err := Find(n.cfg, &specs.Spec{Mounts: []specs.Mount{m}}, "pod")
		check.That(t, err == nil && len(found) == 0, "%s: %v, %v", name, found, err)
	}
}

func TestAnotherPod(t *testing.T) {
	n := newNode(t)
	target := n.publish("a", "pod")
	for _, pod := range []string{"other", ""} {
		n.refused(bind(target), pod, ErrOtherPod)
	}
	both := bind(target)
	both.Mounts = append(both.Mounts, specs.Mount{Type: "bind", Source: n.publish("b", "other")})
	n.refused(both, "pod", ErrOtherPod)
}

func TestBinding(t *testing.T) {
	n := newNode(t)
	m := n.find(bind(n.publish("a", "pod")), "pod")
	check.Require(t, m.Bind(Binding{Sandbox: "../x", Program: "/bin/x"}) != nil, "a path was taken for a sandbox id")
	n.must(m.Bind(Binding{Sandbox: "one", Note: []byte("1"), Program: "/bin/x", Socket: "/run/s"}))
	n.must(m.Bind(Binding{Sandbox: "two", Note: []byte("2"), Program: "/bin/y"}))
	line, err := m.Dir().Line(abi.CLIName)
	check.Require(t, err == nil && line == "/bin/y", "%q, %v", line, err)
	n.must(m.Unbind("one"))
	check.Value(m.Dir().Line(abi.CLIName))(t) // or the word how to ask went with the first of two
	for range 2 {
		n.must(m.Unbind("two"))
	}
	for _, name := range []string{abi.CLIName, abi.SocketName, "two"} {
		_, err := m.Dir().Read(name, 100)
		check.That(t, errors.Is(err, os.ErrNotExist), "%s is left: %v", name, err)
	}
}

// Forward compatibility rests on it: what a handler must understand comes as a new type.
func TestAnUnknownTypeIsRefused(t *testing.T) {
	n := newNode(t)
	target := n.publish("a", "pod")
	file := filepath.Join(n.cfg.Root, abi.DirName(target), abi.InfoName)
	raw := check.Value(os.ReadFile(file))(n.t)
	n.must(os.WriteFile(file, []byte(strings.Replace(string(raw), `"block"`, `"block2"`, 1)), 0o600))
	n.refused(bind(target), "pod", ErrType)
}

func TestSandboxOf(t *testing.T) {
	for name, c := range map[string]struct {
		notes map[string]string
		want  Sandbox
		known bool
	}{
		"none":                                {},
		"containerd's container":              {map[string]string{containerdID: "s", containerdPod: "p", containerdType: "container"}, Sandbox{ID: "s", PodUID: "p"}, true},
		"containerd's sandbox":                {map[string]string{containerdID: "s", containerdPod: "p", containerdType: "sandbox"}, Sandbox{ID: "s", PodUID: "p", Self: true}, true},
		"CRI-O's container":                   {map[string]string{crioID: "s", crioType: "container", crioLabels: `{"io.kubernetes.pod.uid":"p"}`}, Sandbox{ID: "s", PodUID: "p"}, true},
		"CRI-O's sandbox":                     {map[string]string{crioID: "s", crioType: "sandbox", podLabel: "p"}, Sandbox{ID: "s", PodUID: "p", Self: true}, true},
		"containerd's pod, by a pod of CRI-O": {map[string]string{crioID: "s", crioType: "container", podLabel: "p", containerdID: "victim"}, Sandbox{}, false},
		"containerd's uid, by a pod of CRI-O": {map[string]string{crioID: "s", crioType: "container", podLabel: "p", containerdPod: "victim"}, Sandbox{}, false},
		"CRI-O's sandbox, by containerd":      {map[string]string{containerdID: "s", containerdType: "container", crioID: "victim"}, Sandbox{}, false},
		"CRI-O without labels":                {map[string]string{crioID: "s", crioLabels: "?"}, Sandbox{ID: "s"}, true},
	} {
		got, known := SandboxOf(&specs.Spec{Annotations: c.notes})
		check.That(t, got == c.want && known == c.known, "%s: %+v, %v", name, got, known)
	}
}

// CRI-O copies the annotations of a pod into the specs of its containers.
func TestThePodsOwnAnnotationsChooseNoSandbox(t *testing.T) {
	n := newNode(t)
	spec := bind(n.publish("a", "victim"))
	spec.Annotations = map[string]string{
		crioID: "s", crioType: "container", podLabel: "attacker",
		containerdID: "victims-sandbox", containerdPod: "victim", containerdType: "container",
	}
	for _, pod := range []string{"attacker", "victim"} {
		found, err := Find(n.cfg, spec, pod)
		check.Require(t, err != nil, "found %d for %s", len(found), pod)
	}
	n.refused(spec, "victim", ErrTwoRuntimes)
	// Without a deferred volume, annotations keep no container from starting.
	spec.Mounts[1].Source = t.TempDir()
	found, err := Find(n.cfg, spec, "attacker")
	check.That(t, err == nil && len(found) == 0, "%d, %v", len(found), err)
}

func FuzzGuards(f *testing.F) {
	f.Add([]byte("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - tmpfs crust:" + strings.Repeat("a", 64) + " rw\n"))
	f.Fuzz(func(t *testing.T, table []byte) {
		file := filepath.Join(t.TempDir(), "mountinfo")
		check.Must(t, os.WriteFile(file, table, 0o600))
		_, _ = readGuards(file) // an error is an answer; it must be one
	})
}
