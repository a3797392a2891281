package vm

import (
	"bufio"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestTerminalGoesToTheSocket: what a process writes to its terminal is read at the end that
// the socket got.
func TestTerminalGoesToTheSocket(t *testing.T) {
	check.Fails(t, check.Err(sendTerminal(""))) // or without a socket there is a terminal
	path := filepath.Join(t.TempDir(), "s")
	check.Fails(t, check.Err(sendTerminal(path))) // or nobody listens, and there is a terminal
	listener := check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	defer func() { _ = listener.Close() }()
	slave := check.Value(sendTerminal(path))(t)
	defer func() { _ = slave.Close() }()
	conn := check.Value(listener.AcceptUnix())(t)
	defer func() { _ = conn.Close() }()
	name, rights := make([]byte, 100), make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := conn.ReadMsgUnix(name, rights)
	check.Must(t, err)
	messages := check.Value(unix.ParseSocketControlMessage(rights[:m]))(t)
	fds := check.Value(unix.ParseUnixRights(&messages[0]))(t)
	master := os.NewFile(uintptr(fds[0]), "master")
	defer func() { _ = master.Close() }()
	check.That(t, string(name[:n]) == slave.Name() && strings.HasPrefix(slave.Name(), "/dev/pts/"), "%q is the terminal %s", name[:n], slave.Name())
	check.Value(slave.WriteString("hello\n"))(t)
	line, err := bufio.NewReader(master).ReadString('\n')
	check.That(t, err == nil && line == "hello\r\n", "%q, %v", line, err)
}
