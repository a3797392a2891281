package projection

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TreeConfig says where a tree is, and has the words for its errors.
type TreeConfig struct {
	// Name begins errors and failpoints, such as "kata".
	Name string
	// Root holds the directories. Temp is where they are built and removed: on the filesystem of Root and outside it.
	Root, Temp string
	// File is the name of our file in each directory.
	File string
	// What describes the file's content, such as "Kata's mount information". Remedy says
	// what a person can do about a directory of another program.
	What, Remedy string
	// KubeletRoot holds the targets of our volumes: daemons with different ones can
	// share a tree. Without it every marked directory is ours.
	KubeletRoot string
	Log         *zap.Logger
}

// Tree has one directory per volume below a root that other programs read, each with one file of ours in it.
//
// A directory is built outside of the root and renamed into place: a reader sees all of it or
// nothing, and a kill leaves all or nothing. The file in it is replaced the same way. An
// extended attribute marks our directories. Those of others are never touched.
type Tree struct {
	TreeConfig
	mark   string // the extended attribute on our directories
	root   string // KubeletRoot without links, the value of a second attribute
	run    string // makes the temporary names of this start unique
	serial atomic.Uint64
}

// OpenTree makes the directories and removes what a kill left in Temp.
func OpenTree(cfg TreeConfig) (*Tree, error) {
	for _, dir := range []string{cfg.Root, cfg.Temp} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, volume.Errorf(volume.DiskKind(err), "%s: the directory %s cannot be made: %w", cfg.Name, dir, err)
		}
	}
	t := &Tree{TreeConfig: cfg, run: strconv.FormatInt(time.Now().UnixNano(), 36)}
	var err error
	if t.Root, t.Temp, err = cfg.resolve(); err != nil {
		return nil, err
	}
	if t.mark, err = t.chooseMark(); err != nil {
		return nil, err
	}
	if t.root, err = filepath.EvalSymlinks(cfg.KubeletRoot); err != nil {
		t.root = filepath.Clean(cfg.KubeletRoot) // kubelet makes it later
	}
	if cfg.KubeletRoot == "" {
		t.root = ""
	}
	return t, t.clearTemp()
}

// Health returns what keeps the tree from being written to, or nil.
func (t *Tree) Health() error {
	for _, dir := range []string{t.Root, t.Temp} {
		if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
			return volume.Errorf(volume.Internal, "%s: the directory %s cannot be written to: %w", t.Name, dir, err)
		}
	}
	_, _, err := t.resolve()
	return err
}

// resolve resolves Root and Temp. It refuses a Temp from which nothing can be renamed into
// place, or that readers of the tree would see.
func (c *TreeConfig) resolve() (rootPath, tempPath string, err error) {
	rootPath, rootDev, err := c.resolveDir(c.Root)
	if err != nil {
		return "", "", err
	}
	tempPath, tempDev, err := c.resolveDir(c.Temp)
	if err != nil {
		return "", "", err
	}
	if _, below := sys.Below(rootPath, tempPath); below || rootPath == tempPath {
		return "", "", volume.Errorf(volume.Invalid, "%s: the temporary directory %s lies in %s, "+
			"where its files would be taken for those of volumes: put it elsewhere", c.Name, tempPath, rootPath)
	}
	if rootDev != tempDev {
		return "", "", volume.Errorf(volume.Invalid, "%s: the temporary directory %s is not on the filesystem of %s, "+
			"so that nothing can be renamed into place: put it below the same mount", c.Name, tempPath, rootPath)
	}
	return rootPath, tempPath, nil
}

// resolveDir follows a configured directory's links, which are the operator's.
func (c *TreeConfig) resolveDir(dir string) (path string, dev uint64, err error) {
	if path, err = filepath.EvalSymlinks(dir); err != nil {
		return "", 0, volume.Errorf(volume.Internal, "%s: the directory %s cannot be resolved: %w", c.Name, dir, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", 0, volume.Errorf(volume.Internal, "%s: the directory %s cannot be looked at: %w", c.Name, dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return "", 0, volume.Errorf(volume.Invalid, "%s: %s is not a directory", c.Name, dir)
	}
	return path, st.Dev, nil
}

func (t *Tree) clearTemp() error {
	names, err := ReadNames(t.Temp, maxVolumes)
	if err != nil {
		return volume.Errorf(volume.Internal, "%s: the temporary directory %s cannot be read: %w", t.Name, t.Temp, err)
	}
	for _, name := range names {
		if path := filepath.Join(t.Temp, name); os.Remove(path) != nil {
			t.discard(path)
		}
	}
	return nil
}

const maxVolumes = 1 << 20

// Names lists what is below the root.
func (t *Tree) Names() ([]string, error) {
	names, err := ReadNames(t.Root, maxVolumes)
	if err != nil {
		return nil, volume.Errorf(volume.Internal, "%s: the directory %s cannot be read: %w", t.Name, t.Root, err)
	}
	return names, nil
}

// Path returns the path of a volume's directory.
func (t *Tree) Path(name string) string { return t.Root + "/" + name }

func (t *Tree) tempName() string {
	return t.Temp + "/" + t.run + "-" + strconv.FormatUint(t.serial.Add(1), 36)
}

// markNames are the extended attributes that can mark our directories, the best first. trusted.* can be set by root
// only; user.* is for a daemon without privileges. Marker files are no alternative: readers would take one in the
// directory for a sandbox id, and one elsewhere would outlive the directory.
var markNames = []string{"trusted.crust-proxy", "user.crust-proxy"}

// chooseMark finds the attribute that the filesystem supports. It tries it on Temp itself: a
// start must succeed on a filesystem without a free inode, or without room for the attribute.
func (t *Tree) chooseMark() (string, error) {
	var err error
	for _, name := range markNames {
		probe := name + "-probe"
		if err = unix.Lsetxattr(t.Temp, probe, []byte("probe"), 0); err == nil || volume.DiskKind(err) == volume.Exhausted {
			_ = unix.Lremovexattr(t.Temp, probe)
			return name, nil
		}
	}
	return "", volume.Errorf(volume.Unsupported, "%s: the filesystem of %s takes no extended attributes, by which "+
		"our volumes are told from those of other programs: put it and %s on a tmpfs: %w", t.Name, t.Temp, t.Root, err)
}

// Owner is who published a volume's directory.
type Owner uint8

// The owners of a directory.
const (
	Missing   Owner = iota // there is no directory
	OwnedByUs              // it has our mark
	Foreign                // another program made it, or a crust-proxy of another kubelet root
)

// OwnerOf reads the mark of a volume's directory. key is the content of the mark.
func (t *Tree) OwnerOf(dir string) (Owner, volume.Key, error) {
	var buf [128]byte
	n, err := unix.Lgetxattr(t.Path(dir), t.mark, buf[:])
	key, ours := volume.Key(buf[:max(n, 0)]), true
	if err == nil && t.root != "" { // for which kubelet root it was made
		var of [unix.PathMax]byte
		n, err = unix.Lgetxattr(t.Path(dir), t.mark+".root", of[:])
		ours = err == nil && string(of[:n]) == t.root
	}
	switch {
	case err == nil && !ours:
		return Foreign, "", nil
	case err == nil:
		return OwnedByUs, key, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return Missing, "", nil
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ERANGE):
		return Foreign, "", nil
	default:
		return Missing, "", err
	}
}
