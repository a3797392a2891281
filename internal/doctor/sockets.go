package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

func checkSockets(_ context.Context, n Node, _ Daemon) []Finding {
	admin := socketFile{n, "admin", n.AdminSocket}
	runtime := socketFile{n, "runtime", n.RuntimeSocket}
	return append(admin.check(), runtime.check()...)
}

type socketFile struct {
	node       Node
	name, path string
}

func (s socketFile) check() []Finding {
	info, err := os.Lstat(s.node.at(s.path))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		look := "systemctl status crust-proxy-runtime.socket crust-proxy-admin.socket crust-proxy"
		if s.node.Service.InPod {
			look = s.node.Service.Logs()
		}
		return []Finding{failure(look, "the %s socket %s does not exist", s.name, s.path)}
	case err != nil:
		return []Finding{failure("run crustctl doctor as root", "the %s socket %s cannot be looked at: %v", s.name, s.path, err)}
	case info.Mode().Type() != fs.ModeSocket:
		return []Finding{failure("remove the file, then: "+s.node.Service.Restart(), "%s is not a socket", s.path)}
	}
	found := append(s.checkMode(info), s.checkParent()...)
	return orOK(found, "the %s socket %s has mode %04o", s.name, s.path, info.Mode().Perm())
}

func (s socketFile) checkMode(info fs.FileInfo) []Finding {
	var found []Finding
	if mode := info.Mode().Perm(); mode&0o007 != 0 {
		found = append(found, failure(s.recreate(), "the %s socket %s is open to every user: mode %04o", s.name, s.path, mode))
	}
	if owner := ownerOf(info); owner != 0 && owner != s.node.UID {
		found = append(found, failure(s.recreate(),
			"the %s socket %s belongs to uid %d, who can put a program of his own behind it", s.name, s.path, owner))
	}
	return found
}

func (s socketFile) recreate() string {
	if s.node.Service.InPod {
		return s.node.Service.Restart() + ", and see that the configuration's runtimeSocket.mode and adminSocket.mode are 0600 or 0660"
	}
	return "systemctl restart crust-proxy-runtime.socket crust-proxy-admin.socket, and see that the units' SocketMode is 0600 or 0660"
}

// checkParent checks the directory: whoever can write to it can replace the socket.
func (s socketFile) checkParent() []Finding {
	dir := filepath.Dir(s.path)
	info, err := os.Stat(s.node.at(dir))
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "%s cannot be looked at: %v", dir, err)}
	}
	if info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0 {
		return []Finding{failure("chmod go-w "+quoted(dir), "others than its owner may write to %s (mode %04o) and so replace the socket",
			dir, info.Mode().Perm())}
	}
	return nil
}

func ownerOf(info fs.FileInfo) int {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(st.Uid)
	}
	return -1
}

// checkAbstract looks for sockets without a file: no mode protects those, and
// every process of the network namespace may connect (CVE-2020-15257).
func checkAbstract(_ context.Context, n Node, _ Daemon) []Finding {
	data, err := n.read("/proc/net/unix")
	if err != nil {
		return []Finding{warning("", "the node's unix sockets cannot be listed: %v", err)}
	}
	var found []Finding
	for _, line := range strings.Split(string(data), "\n") {
		if _, name, ok := strings.Cut(line, " @"); ok && strings.Contains(name, "crust-proxy") {
			found = append(found, failure("give the socket a path in the file system",
				"crust-proxy listens on the abstract socket @%s, which no file mode protects", name))
		}
	}
	return orOK(found, "crust-proxy has no abstract socket")
}
