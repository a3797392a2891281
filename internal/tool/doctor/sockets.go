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
	return append(checkSocket(n, "admin", n.AdminSocket), checkSocket(n, "runtime", n.RuntimeSocket)...)
}

func checkSocket(n Node, name, path string) []Finding {
	look, recreate := "systemctl status crust-proxy-runtime.socket crust-proxy-admin.socket crust-proxy",
		"systemctl restart crust-proxy-runtime.socket crust-proxy-admin.socket, and see that the units' SocketMode is 0600 or 0660"
	if n.Service.InPod {
		look, recreate = n.Service.Logs(),
			n.Service.Restart()+", and see that the configuration's runtimeSocket.mode and adminSocket.mode are 0600 or 0660"
	}
	info, err := os.Lstat(n.at(path))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []Finding{failure(look, "the %s socket %s does not exist", name, path)}
	case err != nil:
		return []Finding{failure("run crustctl doctor as root", "the %s socket %s cannot be looked at: %v", name, path, err)}
	case info.Mode().Type() != fs.ModeSocket:
		return []Finding{failure("remove the file, then: "+n.Service.Restart(), "%s is not a socket", path)}
	}
	var found []Finding
	mode := info.Mode().Perm()
	if mode&0o007 != 0 {
		found = append(found, failure(recreate, "the %s socket %s is open to every user: mode %04o", name, path, mode))
	}
	if owner := ownerOf(info); owner != 0 && owner != n.UID {
		found = append(found, failure(recreate, "the %s socket %s belongs to uid %d, who can put a program of his own behind it", name, path, owner))
	}
	return orOK(append(found, checkParent(n, filepath.Dir(path))...), "the %s socket %s has mode %04o", name, path, mode)
}

// checkParent checks the directory of a socket: whoever can write to it can replace the
// socket.
func checkParent(n Node, dir string) []Finding {
	info, err := os.Stat(n.at(dir))
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

// checkAbstract checks for sockets without a file: no mode protects those, and every process of
// the network namespace may connect (CVE-2020-15257).
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
