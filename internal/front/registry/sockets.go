package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// socketID tells a socket from a later one with the same path. Inode numbers are reused soon;
// the time is when it was made, which a chmod does not change.
type socketID struct {
	inode uint64
	made  unix.Timespec
}

// idAt returns the id of the socket at a path, or the zero id where none is.
func idAt(path string) socketID { return idBy(unix.Lstat, path) }

// endpoints are those of drivers, which may be links to filesystems that hang.
type endpoints struct{ looks sys.Looks[string] }

// idBehind is idAt for an endpoint.
func (e *endpoints) idBehind(path string) (socketID, error) {
	return sys.Look(&e.looks, path, func() (socketID, error) { return idBy(unix.Stat, path), nil })
}

func idBy(stat func(path string, st *unix.Stat_t) error, path string) socketID {
	var st unix.Stat_t
	if stat(path, &st) != nil {
		return socketID{}
	}
	return socketID{inode: st.Ino, made: st.Mtim}
}

// listing is the sockets that were found in a directory.
type listing struct {
	found map[string]socketID
	// unread are directories that could not be read: there may be more sockets.
	unread []string
	// hangs is set where that takes too long.
	hangs bool
	// watched is set where each change of the listing is noticed.
	watched bool
}

// gone reports whether a socket has gone, or another one has its path. It touches no directory: one of others may
// hang since it was listed.
func (l *listing) gone(path string, id socketID) bool {
	if l.hangs {
		return false
	}
	if now, found := l.found[path]; found {
		return now != id
	}
	return !slices.ContainsFunc(l.unread, func(dir string) bool { return sys.Within(dir, path) })
}

// socketsIn lists the sockets in a directory, and in those below it if that is wanted, as kubelet does in its own.
// watch is called for each directory before it is read. A name that begins with a dot is not meant for us, as with
// kubelet. A directory that cannot be read does not hide the others.
func socketsIn(dir string, below bool, watch func(dir string) bool) (*listing, error) {
	out, watched, dirs := &listing{found: make(map[string]socketID)}, true, 0
	var unread []error
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // it is being made again: the next scan finds it
			watched = false
		case err != nil:
			out.unread, unread = append(out.unread, path), append(unread, err)
		case entry.IsDir() && path != dir && !below:
			return fs.SkipDir
		case entry.IsDir():
			dirs++
			watched = watched && dirs <= maxSockets && watch(path)
		case entry.Type() != fs.ModeSocket || strings.HasPrefix(entry.Name(), "."):
		case len(out.found) == maxListed: // the others may be anywhere
			out.unread, unread = append(out.unread, dir), append(unread, errors.New(dir+" has more sockets than are listed"))
			return fs.SkipAll
		default:
			if id := idAt(path); id != (socketID{}) {
				out.found[path] = id
			}
		}
		return nil
	})
	out.watched = watched && len(unread) == 0
	return out, errors.Join(unread...)
}

func socketPath(dir, name string) string { return fitting(dir, name, ".sock") }

func registrationPath(dir, name string) string { return fitting(dir, name, Suffix) }

// fitting is a path with the name, or with its hash where it would be too long for a socket.
func fitting(dir, name, suffix string) string {
	if path := filepath.Join(dir, name+suffix); len(path) <= sys.MaxSocketPath {
		return path
	}
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(dir, hex.EncodeToString(sum[:8])+suffix)
}

// Registered names the drivers with a registration socket of ours in kubelet's directory, whether somebody serves it
// or not. One with a very long name appears as its hash.
func Registered(kubeletRegistry string) (drivers []string) {
	now, _ := socketsIn(kubeletRegistry, false, func(string) bool { return false }) // those that cannot be listed stay
	for path := range now.found {
		if name, ours := strings.CutSuffix(filepath.Base(path), Suffix); ours {
			drivers = append(drivers, name)
		}
	}
	slices.Sort(drivers)
	return drivers
}

// Withdraw removes our registration sockets that nobody serves from kubelet's directory, and returns their paths.
// kubelet then deregisters their drivers. Otherwise it would call CSI sockets that nobody serves either, and refuse the
// drivers' own registrations, because their names are taken.
func Withdraw(kubeletRegistry string) (gone []string) {
	for _, driver := range Registered(kubeletRegistry) {
		path := filepath.Join(kubeletRegistry, driver+Suffix)
		if served, err := sys.IsServed(path); !served && err == nil && os.Remove(path) == nil {
			gone = append(gone, path)
		}
	}
	return gone
}
