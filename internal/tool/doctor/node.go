package doctor

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// maxFile bounds what is read of any one file: some are written by others.
const maxFile = 4 << 20

// Node has the paths to check. They are as the node's own programs see them; Root is put
// before each of them.
type Node struct {
	// Root is "/" on a real node, and a directory in tests.
	Root          string
	AdminSocket   string
	RuntimeSocket string
	RunDir        string
	KataDir       string
	// KataTempDir is where the daemon makes Kata's files ready, if it was set.
	KataTempDir string
	// SandboxDirs hold a directory for each running sandbox of Kata, of the Go
	// and of the Rust runtime.
	SandboxDirs []string
	KubeletRoot string
	// KubeletRegistry is where drivers register with kubelet, and FrontRegistry where
	// they register with the front; empty is the usual place below KubeletRoot.
	KubeletRegistry string
	FrontRegistry   string
	// MarksDir has a mark of each volume that the host does not mount after a sandbox; empty
	// where the front is off. RulesByPod are the names of rules that depend on the pod.
	MarksDir   string
	RulesByPod []string
	// ContainerdSocket is containerd's gRPC socket; empty where it is not used.
	ContainerdSocket string
	// CRISocket is the socket of another container runtime, where that is used.
	CRISocket string
	// Kubeconfig is by what the daemon asks a cluster about the node's pods; empty
	// where it does not. InCluster is set where it does so by its pod's service
	// account. NodeName is the node's name there; empty is the host name.
	Kubeconfig string
	InCluster  bool
	NodeName   string
	// UID is the user who runs the checks; root's and this user's sockets are
	// both taken as rightly owned.
	UID int
	// Service is how the daemon is reached, for advice.
	Service Service
	Probe   Probe

	// table returns the mount table, which is read once for all checks.
	table func() ([]*mountinfo.Info, error)
}

// DefaultNode is this machine with everything in its usual place.
func DefaultNode() Node {
	usual := config.Default()
	n := Node{
		Root: "/", AdminSocket: usual.AdminSocket.Path,
		UID: os.Getuid(), Service: ServiceOf(os.Getenv), Probe: KernelProbe(),
	}
	n.Configure(usual)
	return n
}

// Configure sets the paths from the daemon's configuration, except that of the admin socket, by
// which the configuration was read.
func (n *Node) Configure(c config.Config) {
	kata := c.Handlers.Kata
	n.RunDir, n.RuntimeSocket, n.KubeletRoot = c.RunDir, c.RuntimeSocket.Path, c.KubeletRoot
	n.KubeletRegistry, n.FrontRegistry = c.Front.KubeletRegistry, c.Front.Registry
	n.KataDir, n.KataTempDir = kata.DirectVolumes, kata.TempDir
	n.SandboxDirs = append(n.SandboxDirs, kata.GoSandboxes, kata.RustSandboxes) // a sandbox may be of an earlier configuration
	n.ContainerdSocket, n.CRISocket = c.Containerd.Socket, c.CRI.Socket
	if c.Front.Enabled { // else nobody asks for pods
		n.MarksDir, n.RulesByPod = c.Front.MarksDir, rulesByPod(c)
		n.Kubeconfig, n.InCluster, n.NodeName = c.Cluster.Kubeconfig, c.Cluster.InCluster, c.Cluster.NodeName
	}
	n.Service.InPod = n.Service.InPod || c.Cluster.InCluster
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
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxFile)
	}
	return data, err
}

func (n Node) readInt(path string) (int64, error) {
	data, err := n.read(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// glob lists the files that match patterns.
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

// mountTable reads the mount table of a process.
func mountTable(ctx context.Context, file string) ([]*mountinfo.Info, error) {
	return sys.Mounts(ctx, file, func(string) bool { return true })
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

// mountOf finds the mount that a path is on: the deepest one, and of several at one mount point
// the last.
func mountOf(table []*mountinfo.Info, path string) *mountinfo.Info {
	var best *mountinfo.Info
	for _, m := range table {
		if sys.Within(m.Mountpoint, path) && (best == nil || len(m.Mountpoint) >= len(best.Mountpoint)) {
			best = m
		}
	}
	return best
}
