package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
)

// maxFile bounds what is read of any one file: some are written by others.
const maxFile = 4 << 20

// Node has the paths to check, as the node's own programs see them; Root is put before each.
type Node struct {
	Root        string // "/" on a real node, and a directory in tests
	AdminSocket string
	Config      config.Config // the daemon's; the cluster's part is empty if the front is off
	Before      bool          // crust-proxy is not installed yet
	UID         int           // who runs the checks: sockets may belong to root or to this user
	Service     Service       // how the daemon is reached, for advice
	Probe       Probe

	// table returns the mount table, which is read once for all checks.
	table func() ([]*mountinfo.Info, error)
}

// DefaultNode is this machine with everything in its usual place.
func DefaultNode() Node {
	usual := config.Default()
	n := Node{
		Root: "/", AdminSocket: usual.AdminSocket.Path,
		UID: os.Getuid(), Service: ServiceOf(os.Getenv), Probe: Probe{Openat2: sys.ProbeOpenat2, Guard: guard.Probe},
	}
	n.Configure(usual)
	return n
}

// Configure sets the daemon's configuration. The admin socket, by which it was read, stays.
func (n *Node) Configure(c config.Config) {
	n.Service.InPod = n.Service.InPod || c.Cluster.InCluster
	if !c.Front.Enabled { // nobody asks for pods
		c.Cluster = config.Cluster{}
	}
	n.Config = c
}

func (n Node) at(path string) string { return filepath.Join(n.Root, path) }

// resolve resolves the symbolic links in a path that exists, to compare it with the kernel's
// mount table, which has no links.
func (n Node) resolve(path string) string {
	root, err := filepath.EvalSymlinks(n.at("/"))
	resolved, gone := filepath.EvalSymlinks(n.at(path))
	below, inside := sys.Below(root, resolved)
	if err != nil || gone != nil || !inside {
		return path
	}
	return "/" + below
}

// read reads a regular file, or one of the kernel's, up to a bound.
func (n Node) read(path string) ([]byte, error) {
	// O_NONBLOCK: a FIFO that somebody put there must not hold us up.
	f, err := os.OpenFile(n.at(path), os.O_RDONLY|syscall.O_NONBLOCK, 0) // #nosec G304 -- an operator's tool reads the node
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // nothing was written: closing cannot lose anything
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, cmp.Or(err, fmt.Errorf("%s is not a regular file", path))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxFile)
	}
	return data, err
}

func (n Node) glob(patterns ...string) (paths []string) {
	for _, pattern := range patterns {
		found, _ := filepath.Glob(n.at(pattern)) // one that is malformed matches nothing
		for _, path := range found {
			paths = append(paths, filepath.Join("/", strings.TrimPrefix(path, n.Root)))
		}
	}
	return paths
}

func (n Node) dial(ctx context.Context, socket string, wait time.Duration) error {
	conn, err := (&net.Dialer{Timeout: wait}).DialContext(ctx, "unix", n.at(socket))
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return err
}

func mountTable(ctx context.Context, file string) ([]*mountinfo.Info, error) {
	return sys.Mounts(ctx, file, func(string) bool { return true })
}

func (n *Node) readTableOnce(ctx context.Context) {
	n.table = sync.OnceValues(func() ([]*mountinfo.Info, error) { return mountTable(ctx, n.at("/proc/self/mountinfo")) })
}

func noTable(err error) Finding { return warning("", "the mount table cannot be read: %v", err) }

// mountOf finds the mount that a path is on. If it returns nil, the finding says why.
func (n Node) mountOf(path string) (*mountinfo.Info, Finding) {
	table, err := n.table()
	if err != nil {
		return nil, noTable(err)
	}
	return mountOf(table, n.resolve(path)), warning("", "no mount holds %s", path)
}

// mountOf finds the mount that a path is on: the deepest one, and of several at one mount point the last.
func mountOf(table []*mountinfo.Info, path string) (best *mountinfo.Info) {
	for _, m := range table {
		if sys.Within(m.Mountpoint, path) && (best == nil || len(m.Mountpoint) >= len(best.Mountpoint)) {
			best = m
		}
	}
	return best
}
