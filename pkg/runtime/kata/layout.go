package kata

import (
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// maxIDs bounds the sandbox ids taken from one volume's directory.
const maxIDs = 64

var podOfTarget = regexp.MustCompile(`/pods/([A-Za-z0-9][A-Za-z0-9-]{0,63})/volumes/`)

func podUIDOf(target string) string {
	if parts := podOfTarget.FindStringSubmatch(target); parts != nil {
		return parts[1]
	}
	return ""
}

// layout is Kata's tree of volumes: a directory for each, named by its target path,
// with mountInfo.json and one file for each sandbox.
type layout struct{ root string }

// DirOf names a volume's directory.
func (l layout) DirOf(v *volume.Volume) (string, bool) { return nameOf(v), hasName(v) }

// KeyOf is the key of the target that a directory is named by.
func (l layout) KeyOf(dir string) (volume.Key, bool) {
	target, ok := targetOf(dir)
	return volume.KeyOf(target), ok
}

// Encode gives a volume's mountInfo.json.
func (l layout) Encode(v *volume.Volume) ([]byte, error) { return encodeInfo(v) }

// Read reads a volume back. Only the paths are set where mountInfo.json cannot be
// read, and the device too where it makes no sense otherwise.
func (l layout) Read(dir string) *volume.Volume {
	target, _ := targetOf(dir)
	v := &volume.Volume{
		Key: volume.KeyOf(target), Target: target, ResolvedTarget: target,
		Handler: Name, PodUID: podUIDOf(target),
	}
	file := filepath.Join(l.root, dir, infoName)
	raw, err := sys.ReadSmall(file, maxInfo)
	if err != nil {
		return v
	}
	v.Device = tree.DeviceIn(raw)
	info, err := parseInfo(raw)
	if err != nil {
		return v
	}
	v.FSType = info.FSType
	v.MountFlags = info.Options
	v.ReadOnly = info.ReadOnly()
	v.Group = info.Metadata["fsGroup"]
	v.GroupPolicy = info.GroupPolicy()
	if st, err := os.Lstat(file); err == nil {
		v.Created = st.ModTime().Round(time.Microsecond)
	}
	return v
}

// Sandboxes lists the sandbox-id files of a volume, the newest first. The Go runtime
// writes one when it creates a container; nobody removes it.
func (l layout) Sandboxes(dir string) []string {
	ids, _ := sys.NewestFiles(unix.AT_FDCWD, filepath.Join(l.root, dir), maxIDs+1, abi.IsSandboxID)
	return ids
}
