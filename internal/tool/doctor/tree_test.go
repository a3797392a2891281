package doctor

import (
	"encoding/base64"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const (
	targetA  = "/var/lib/kubelet/pods/a/volumes/kubernetes.io~csi/pv-a/mount"
	goodInfo = `{"volume-type":"directvol","device":"/dev/loop0","fstype":"ext4","options":["rw"],"metadata":{"fsGroup":"7"}}`
	mountsOK = `21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /proc rw shared:2 - proc proc rw
25 21 0:23 / /run rw,nosuid shared:5 - tmpfs tmpfs rw,size=1024k
`
)

var live = strings.Repeat("ab", 32)

// tree is a fake node on which everything is as it should be.
type tree struct {
	t    *testing.T
	node Node
}

func newTree(t *testing.T) tree {
	t.Helper()
	root := check.ShortDir(t)
	n := DefaultNode()
	n.Root, n.Config.Front.Enabled, n.Config.Front.MarksDir = root, true, "/var/lib/kubelet/crust-proxy/marks"
	n.Config.Policy.Rules = []policy.Rule{{Name: "kata", RuntimeHandlers: []string{"kata"}}}
	n.Probe = Probe{Openat2: func() error { return nil }, Guard: func() error { return nil }}
	tr := tree{t: t, node: n}
	tr.write("/proc/self/mountinfo", mountsOK)
	tr.write("/proc/sys/kernel/osrelease", "6.12.1-cloud\n")
	for _, name := range []string{"blkid", "mkfs.ext4", "e2fsck", "resize2fs", "debugfs", "mkfs.xfs", "mkfs.btrfs"} {
		tr.write("/usr/sbin/"+name, "")
	}
	tr.mkdir("/var/lib/kubelet", 0o755)
	tr.write(n.Config.Front.MarksDir+"/one.json", "{}")
	tr.mkdir(n.Config.RunDir, 0o755)
	tr.mkdir(n.Config.Handlers.Kata.DirectVolumes, 0o700)
	tr.mkdir("/run/containerd", 0o755)
	for _, s := range []string{n.AdminSocket, n.Config.RuntimeSocket.Path, n.Config.Containerd.Socket} {
		tr.listen(s)
	}
	tr.write("/etc/kata-containers/configuration.toml", "[hypervisor.qemu]\ndisable_block_device_use = false\n")
	return tr
}

func (tr tree) mkdir(path string, mode os.FileMode) {
	tr.t.Helper()
	full := tr.node.at(path)
	check.Must(tr.t, os.MkdirAll(full, mode))
	check.Must(tr.t, os.Chmod(full, mode))
}

func (tr tree) write(path, text string) {
	tr.t.Helper()
	full := tr.node.at(path)
	check.Must(tr.t, os.MkdirAll(filepath.Dir(full), 0o750))
	if err := os.WriteFile(full, []byte(text), 0o600); err != nil { // #nosec G703 -- a path of the test
		tr.t.Fatal(err)
	}
}

func (tr tree) symlink(to, path string) {
	tr.t.Helper()
	check.Must(tr.t, os.MkdirAll(filepath.Dir(tr.node.at(path)), 0o750))
	check.Must(tr.t, os.Symlink(to, tr.node.at(path)))
}

func (tr tree) remove(path string) {
	tr.t.Helper()
	check.Must(tr.t, os.RemoveAll(tr.node.at(path)))
}

func (tr tree) chmod(path string, mode os.FileMode) {
	tr.t.Helper()
	check.Must(tr.t, os.Chmod(tr.node.at(path), mode))
}

func (tr tree) listen(path string) {
	tr.t.Helper()
	l := check.Value(net.Listen("unix", tr.node.at(path)))(tr.t)
	tr.t.Cleanup(func() { _ = l.Close() })
	tr.chmod(path, 0o600)
}

// kataVolume makes a well-formed volume and gives its directory.
func (tr tree) kataVolume(target, info string) string {
	dir := filepath.Join(tr.node.Config.Handlers.Kata.DirectVolumes, base64.URLEncoding.EncodeToString([]byte(target)))
	tr.mkdir(dir, 0o700)
	tr.write(filepath.Join(dir, abi.InfoName), info)
	return dir
}

// mount adds a line to the mount table.
func (tr tree) mount(id, at, fstype, source string) {
	old := check.Value(os.ReadFile(tr.node.at("/proc/self/mountinfo")))(tr.t)
	tr.write("/proc/self/mountinfo", string(old)+id+" 21 0:99 / "+at+" rw shared:9 - "+fstype+" "+source+" rw\n")
}

func idOf(target string) string { return string(volume.KeyOf(target)) }

func healthyDaemon() Daemon {
	return Daemon{Node: &adminv1.GetNodeResponse{Version: sys.Version()}, Handlers: []*adminv1.Handler{{Name: "kata", Healthy: true}}}
}

func withVolume(state adminv1.VolumeState, lastError string) Daemon {
	d := healthyDaemon()
	d.Volumes = []*adminv1.Volume{{Id: idOf(targetA), TargetPath: targetA, State: state, LastError: lastError}}
	return d
}

// findingsOf runs one check.
func findingsOf(t *testing.T, name string, n Node, d Daemon) []Finding {
	t.Helper()
	n.readTableOnce(t.Context())
	i := slices.IndexFunc(checks, func(c namedCheck) bool { return c.name == name })
	return checks[i].run(t.Context(), n, d)
}
