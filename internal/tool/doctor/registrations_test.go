package doctor

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

const registry = "/var/lib/kubelet/plugins_registry/"

// registered makes sockets that are served.
func (tr tree) registered(names ...string) {
	tr.t.Helper()
	for _, name := range names {
		tr.mkdir(filepath.Dir(registry+name), 0o755)
		tr.listen(registry + name)
	}
}

// leftOver makes a socket that nobody serves any more.
func (tr tree) leftOver(path string) {
	tr.t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tr.node.at(path), Net: "unix"})
	if err != nil {
		tr.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		tr.t.Fatal(err)
	}
}

func registrationFaults() []bad {
	return []bad{
		{"both", "registrations", func(tr tree, _ *Node, _ *Daemon) {
			tr.registered("a.example.crust-proxy-reg.sock", "a.example-reg.sock", "other-reg.sock")
		}, Error, "a.example registers with kubelet directly (" + registry + "a.example-reg.sock)", "/var/lib/kubelet/crust-proxy/registry"},
		{"in a directory", "registrations", func(tr tree, _ *Node, _ *Daemon) {
			tr.registered("a.crust-proxy-reg.sock", "sub/a-reg.sock")
		}, Error, registry + "sub/a-reg.sock", "crustctl drivers"},
		{"left over", "registrations", func(tr tree, _ *Node, _ *Daemon) {
			tr.registered("a.crust-proxy-reg.sock")
			tr.leftOver(registry + "a-reg.sock")
		}, Warn, "nobody serves", "rm " + registry + "a-reg.sock"},
		{"registry elsewhere", "registrations", func(tr tree, n *Node, d *Daemon) {
			n.KubeletRegistry, n.FrontRegistry = "/r", "/ours"
			tr.mkdir("/r", 0o755)
			tr.listen("/r/a.crust-proxy-reg.sock")
			tr.listen("/r/a-reg.sock")
			*d = Daemon{Err: os.ErrNotExist} // and with the daemon down
		}, Error, "/r/a-reg.sock", "/ours"},
		{"no directory", "registrations", func(tr tree, n *Node, _ *Daemon) {
			tr.symlink("plugins_registry", n.KubeletRoot+"/plugins_registry") // a loop
			n.KubeletRegistry = n.KubeletRoot + "/plugins_registry/x"
		}, Warn, "cannot be looked at", "root"},
	}
}

func TestDriversThatAreNotTheFrontsMayRegister(t *testing.T) {
	tr := newTree(t)
	tr.registered("a.crust-proxy-reg.sock", "b-reg.sock", "a-b-reg.sock", "a.other-reg.sock")
	tr.write(registry+"a-reg.sock", "a file, which kubelet passes over")
	got := findingsOf(t, "registrations", tr.node, healthyDaemon())
	if len(got) != 1 || got[0].Severity != OK {
		t.Errorf("got %+v", got)
	}
}
