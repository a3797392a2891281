package kata

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// idForm is what a sandbox id may look like. It becomes part of a path.
var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)

// maxIDs bounds the sandbox ids taken from one volume's directory.
const maxIDs = 64

// podOfTarget finds the pod in kubelet's layout.
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
	raw, err := tree.ReadSmall(file, maxInfo)
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
	v.ReadOnly = slices.Contains(info.Options, "ro")
	v.Group = info.Metadata["fsGroup"]
	v.GroupPolicy = volume.GroupPolicy(info.Metadata["fsGroupChangePolicy"])
	if st, err := os.Lstat(file); err == nil {
		v.Created = st.ModTime().Round(time.Microsecond)
	}
	return v
}

// Sandboxes lists the sandbox-id files of a volume, the newest first. The Go runtime
// writes one when it creates a container; nobody removes it.
func (l layout) Sandboxes(dir string) []string {
	dir = filepath.Join(l.root, dir)
	ids, err := tree.ReadNames(dir, maxIDs+1)
	if err != nil {
		return nil
	}
	made := make(map[string]int64, len(ids))
	ids = slices.DeleteFunc(ids, func(id string) bool {
		var st unix.Stat_t
		if id == infoName || !idForm.MatchString(id) ||
			unix.Lstat(filepath.Join(dir, id), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return true
		}
		made[id] = st.Mtim.Nano()
		return false
	})
	slices.SortFunc(ids, func(a, b string) int {
		return cmp.Or(cmp.Compare(made[b], made[a]), strings.Compare(a, b))
	})
	return ids
}
