package handler

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

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
	check.Must(t, os.MkdirAll(n.proc+"/sys", 0o755))
	check.Must(t, os.WriteFile(n.program, nil, 0o600))
	check.Must(t, os.WriteFile(dir+"/runc", nil, 0o600))
	check.Must(t, os.Symlink(n.program, n.link))
	return n
}

func (n *node) process(cwd string, args ...string) {
	n.last++
	dir := fmt.Sprintf("%s/%d", n.proc, n.last)
	check.Must(n.t, os.MkdirAll(dir, 0o755))
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
		"nobody":            {func(*node) {}, ""},
		"another program":   {func(n *node) { n.shim("a", n.dir+"/runc") }, ""},
		"containerd":        {func(n *node) { n.shim("sandbox-a", n.program) }, "sandbox sandbox-a (shim 1)"},
		"by a link":         {func(n *node) { n.shim("sandbox-a", n.link) }, "sandbox sandbox-a (shim 1)"},
		"by its name":       {func(n *node) { n.shim("sandbox-a", "crust-runc") }, "sandbox sandbox-a (shim 1)"},
		"CRI-O":             {func(n *node) { n.process("/", "/usr/bin/conmon", "-b", "/b", "-c", "c1", "-r", n.program) }, "container c1 (conmon 1)"},
		"podman":            {func(n *node) { n.process("/", "/usr/bin/conmon", "--runtime="+n.program, "--cid", "c2") }, "container c2 (conmon 1)"},
		"CRI-O with runc":   {func(n *node) { n.process("/", "/usr/bin/conmon", "-c", "c1", "-r", "/usr/bin/runc") }, ""},
		"an editor":         {func(n *node) { n.process("/", "vi", "-r", n.program) }, ""},
		"the program":       {func(n *node) { n.process("/", n.program, "crust", "removable") }, ""},
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
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("it says %v, want %q", err, c.says)
			}
		})
	}
	if err := unused(filepath.Join(t.TempDir(), "proc"), "/usr/bin/crust-runc"); err == nil {
		t.Error("removable where nothing can be told")
	}
}
