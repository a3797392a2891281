package doctor

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
)

// maxFile bounds what is read of any one file: some are written by others.
const maxFile = 4 << 20

// Node has the paths to check, as the node's own programs see them; Root is put before each.
type Node struct {
	Root                       string // "/" on a real node, and a directory in tests
	AdminSocket, RuntimeSocket string
	RunDir                     string
	KataDir                    string
	SandboxDirs                []string // have a directory for each running sandbox of Kata, Go and Rust
	KubeletRoot                string
	// MarksDir has a mark of each volume that the host does not mount after a sandbox; empty
	// if the front is off. RulesByPod are the names of rules that depend on the pod.
	MarksDir         string
	RulesByPod       []string
	Policy           *policy.Policy
	ContainerdSocket string // empty if it is not used
	CRISocket        string // of another container runtime, if that is used
	// Kubeconfig is the file by which the daemon looks up pods; empty if it does not. With
	// InCluster it uses its pod's service account. NodeName is by default the host name.
	Kubeconfig string
	InCluster  bool
	NodeName   string
	Before     bool    // crust-proxy is not installed yet
	UID        int     // who runs the checks: sockets may belong to root or to this user
	Service    Service // how the daemon is reached, for advice
	Probe      Probe

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

// Configure sets the paths from the daemon's configuration, except that of the admin socket, by
// which the configuration was read.
func (n *Node) Configure(c config.Config) {
	kata := c.Handlers.Kata
	n.RunDir, n.RuntimeSocket, n.KubeletRoot = c.RunDir, c.RuntimeSocket.Path, c.KubeletRoot
	n.KataDir = kata.DirectVolumes
	n.SandboxDirs = append(slices.Clone(n.SandboxDirs), kata.GoSandboxes, kata.RustSandboxes) // a sandbox may be of an earlier configuration
	n.ContainerdSocket, n.CRISocket = c.Containerd.Socket, c.CRI.Socket
	n.Policy = c.DeferralPolicy()
	if c.Front.Enabled { // else nobody asks for pods
		n.MarksDir, n.RulesByPod = c.Front.MarksDir, nil
		for _, rule := range c.Policy.Rules {
			if len(rule.ByPod()) > 0 {
				n.RulesByPod = append(n.RulesByPod, fmt.Sprintf("%q", rule.Name))
			}
		}
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
