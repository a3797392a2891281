package doctor

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/sys"
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
	// KubeletRegistry is where drivers register with kubelet; empty is its usual
	// place below KubeletRoot. FrontRegistry is where they register with the front.
	KubeletRegistry string
	FrontRegistry   string
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

	// table gives the mount table; Run has all checks share one reading of it.
	table func() ([]*mountinfo.Info, error)
}

// DefaultNode is this machine with everything in its usual place.
func DefaultNode() Node {
	return Node{
		Root:             "/",
		AdminSocket:      "/run/crust-proxy/admin.sock",
		RuntimeSocket:    "/run/crust-proxy/runtime.sock",
		RunDir:           "/run/crust-proxy",
		KataDir:          "/run/kata-containers/shared/direct-volumes",
		SandboxDirs:      []string{"/run/vc/sbs", "/run/kata"},
		KubeletRoot:      "/var/lib/kubelet",
		ContainerdSocket: "/run/containerd/containerd.sock",
		UID:              os.Getuid(),
		Service:          ServiceOf(os.Getenv),
		Probe:            KernelProbe(),
	}
}

func (n Node) at(path string) string { return filepath.Join(n.Root, path) }

// resolve follows symbolic links as far as the path exists, for comparing it
// with the kernel's mount table, which knows no links.
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

// glob lists the files of a directory that match a pattern, Kata's default file first:
// it is the name that people look for.
func (n Node) glob(dir, pattern string) []string {
	entries, err := os.ReadDir(n.at(dir))
	if err != nil {
		return nil // a directory that is not there holds no configuration
	}
	var paths []string
	for _, e := range entries {
		if ok, _ := filepath.Match(pattern, e.Name()); ok { // the pattern is constant and well formed
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	sort.SliceStable(paths, func(i, j int) bool {
		return filepath.Base(paths[i]) == katasDefault && filepath.Base(paths[j]) != katasDefault
	})
	return paths
}

func (n Node) dial(ctx context.Context, socket string, wait time.Duration) error {
	conn, err := (&net.Dialer{Timeout: wait}).DialContext(ctx, "unix", n.at(socket))
	if err == nil {
		_ = conn.Close() // nothing was sent
	}
	return err
}

// readMounts reads the mount table of our own mount namespace.
func (n Node) readMounts() ([]*mountinfo.Info, error) {
	data, err := os.ReadFile(n.at("/proc/self/mountinfo"))
	if err != nil {
		return nil, err
	}
	return mountinfo.GetMountsFromReader(bytes.NewReader(data), nil)
}

func noTable(err error) Finding { return warning("", "the mount table cannot be read: %v", err) }

// mountOf finds the mount that a path lies on, or tells why not.
func (n Node) mountOf(path string) (*mountinfo.Info, Finding) {
	table, err := n.table()
	if err != nil {
		return nil, noTable(err)
	}
	return mountOf(table, n.resolve(path)), warning("", "no mount holds %s", path)
}

// mountOf finds the mount that a path lies on: the deepest one, and of several
// on one point the last.
func mountOf(table []*mountinfo.Info, path string) *mountinfo.Info {
	var best *mountinfo.Info
	for _, m := range table {
		if sys.Within(m.Mountpoint, path) && (best == nil || len(m.Mountpoint) >= len(best.Mountpoint)) {
			best = m
		}
	}
	return best
}
