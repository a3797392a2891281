package doctor

import (
	"net"
	"os"
	"strings"
	"testing"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func TestCRIO(t *testing.T) {
	const main, dropIn = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d/"
	const off, on = "[crio.runtime]\ndrop_infra_ctr = false\n", "[crio.runtime]\ndrop_infra_ctr = true\n"
	crust := &adminv1.Handler{Name: "crust"}
	for name, c := range map[string]struct {
		files    map[string]string
		handlers []*adminv1.Handler
		want     Severity
		seen     string
	}{
		"no configuration":      {nil, []*adminv1.Handler{crust}, Error, "drop_infra_ctr = true (its default)"},
		"said so":               {map[string]string{main: on}, []*adminv1.Handler{crust}, Error, main + ":2"},
		"right":                 {map[string]string{main: off}, []*adminv1.Handler{crust}, OK, main + ":2"},
		"a later file is right": {map[string]string{main: on, dropIn + "10-a.conf": off}, []*adminv1.Handler{crust}, OK, "10-a.conf:2"},
		"a later file is wrong": {map[string]string{dropIn + "10-a.conf": off, dropIn + "20-b.conf": on}, []*adminv1.Handler{crust}, Error, "20-b.conf:2"},
		"another table":         {map[string]string{main: "[crio.image]\ndrop_infra_ctr = false\n"}, []*adminv1.Handler{crust}, Error, "its default"},
		"unreadable":            {map[string]string{main: "[crio"}, []*adminv1.Handler{crust}, Warn, "cannot be read"},
		"without crust-runc":    {nil, []*adminv1.Handler{{Name: "kata"}}, OK, "crust-runc is not used"},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			node, daemon := tr.node, healthyDaemon()
			node.ContainerdSocket, node.CRISocket = "", "/var/run/crio/crio.sock"
			daemon.Handlers = c.handlers
			for path, text := range c.files {
				tr.write(path, text)
			}
			got := findingsOf(t, "cri-o", node, daemon)
			if len(got) != 1 || got[0].Severity != c.want || !strings.Contains(got[0].Seen, c.seen) {
				t.Errorf("got %+v, want %s with %q", got, c.want, c.seen)
			}
		})
	}
}

// CRI-O runs, and what crust-proxy follows is containerd.
func TestCRIOBesideContainerd(t *testing.T) {
	tr := newTree(t)
	// The path of a socket is short: the tree's own is not always.
	root, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(root) }()
	node := tr.node
	node.Root = root
	if err := os.MkdirAll(root+"/run/crio", 0o755); err != nil {
		t.Fatal(err)
	}
	if got := findingsOf(t, "cri-o", node, healthyDaemon()); got[0].Severity != OK {
		t.Errorf("without CRI-O: %+v", got)
	}
	listener, err := net.Listen("unix", root+"/run/crio/crio.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	got := findingsOf(t, "cri-o", node, healthyDaemon())
	if got[0].Severity != Warn || !strings.Contains(got[0].Seen, "CRI-O answers") || !strings.Contains(got[0].Do, "cri.socket") {
		t.Errorf("with CRI-O: %+v", got)
	}
}
