package projection

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const maxFile = 64 << 10

// lookEvery is how long it counts that a projection was found right: not every change shows in the times of its files.
const lookEvery = 10 * time.Minute

type outcome uint8

const (
	again   outcome = iota // the directory came or went meanwhile: repeat
	asItWas                // it was right already
	written
)

// Publish makes sure that the volume's directory exists with the right file in it. It never puts another file there.
func (s *Store) Publish(ctx context.Context, v *volume.Volume) (changed bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, guest.ContextError(v, "", err)
	}
	dir, _ := s.format.DirOf(v)
	before, _ := s.Bindings.Get(v.Key)
	known := before.Volume == v && before.Owner == OwnedByUs
	var now stamps
	if known {
		if now = s.Tree.stamps(dir); now != (stamps{}) && now == before.right && time.Since(before.looked) < lookEvery {
			return false, nil
		}
	}
	raw, err := s.format.Encode(v)
	if err != nil {
		return false, s.Tree.Error(v, "encoded", err)
	}
	// One retry each way: the directory can come or go between two calls.
	for range 3 {
		done, err := s.publishOnce(v, dir, raw)
		if err != nil {
			return false, err
		}
		if done == again {
			continue
		}
		s.Bindings.Track(Entry{Volume: v, Owner: OwnedByUs})
		if known && done == asItWas {
			s.Bindings.setRight(v, now)
		}
		return done == written, nil
	}
	return false, volume.Errorf(volume.Busy, "volume %s: another program keeps changing %s: try again", v.Target, s.Tree.Path(dir))
}

// stamps are those of a volume's directory and of its file.
type stamps [2]sys.Stamp

// stamps returns those of a directory, or none if it cannot be told from a later one: the clock of the kernel's
// times is coarse.
func (t *Tree) stamps(dir string) (out stamps) {
	for n, path := range [...]string{t.Path(dir), t.Path(dir) + "/" + t.File} {
		stamp, _, err := sys.StampAt(unix.AT_FDCWD, path)
		if err != nil || !stamp.Settled() {
			return stamps{}
		}
		out[n] = stamp
	}
	return out
}

func (s *Store) publishOnce(v *volume.Volume, dir string, raw []byte) (outcome, error) {
	whose, key, err := s.Tree.OwnerOf(dir)
	switch {
	case err != nil:
		return again, s.Tree.Error(v, "looked at", err)
	case whose == Missing:
		return s.publishNew(v, dir, raw)
	case whose == OwnedByUs && key == v.Key:
		return s.Tree.rewrite(v, dir, raw)
	default:
		return again, volume.Errorf(volume.Conflict, "volume %s: another program has already published it in %s: "+
			"let that program take it back, or %s", v.Target, s.Tree.Path(dir), s.Tree.Remedy)
	}
}

func (s *Store) publishNew(v *volume.Volume, dir string, raw []byte) (outcome, error) {
	t := s.Tree
	temp, err := t.Build(v.Key, raw)
	if err != nil {
		t.discard(temp)
		return again, t.Error(v, "built", err)
	}
	// The watch is set before any runtime can reach the directory, so that no sandbox id is
	// missed. If that fails, Health reports it and the tree is read regularly.
	s.Bindings.Track(Entry{Volume: v, Owner: OwnedByUs})
	_ = s.Watch.Add(v.Key, temp, OwnedByUs)
	failpoint.Hit(t.Name + "-built")
	err = sys.InDir(t.Root, func() error {
		return unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, t.Path(dir), unix.RENAME_NOREPLACE)
	})
	if err == nil {
		return written, nil
	}
	t.discard(temp)
	s.forget(v.Key)
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOENT) {
		return again, nil
	}
	return again, t.Error(v, "put in place", err)
}

// Build makes a directory of ours in Temp.
func (t *Tree) Build(key volume.Key, raw []byte) (temp string, err error) {
	temp = t.tempName()
	if err := sys.InDir(t.Temp, func() error { return unix.Mkdir(temp, 0o700) }); err != nil {
		return temp, err
	}
	failpoint.Hit(t.Name + "-directory-made")
	err = unix.Lsetxattr(temp, t.mark, []byte(key), 0)
	if err == nil && t.root != "" {
		err = unix.Lsetxattr(temp, t.mark+".root", []byte(t.root), 0)
	}
	if err != nil {
		return temp, err
	}
	return temp, sys.WriteNew(unix.AT_FDCWD, temp+"/"+t.File, raw)
}

func (t *Tree) rewrite(v *volume.Volume, dir string, raw []byte) (outcome, error) {
	file := t.Path(dir) + "/" + t.File
	old, err := sys.ReadSmall(file, maxFile)
	if err == nil && bytes.Equal(old, raw) {
		return asItWas, nil
	}
	temp := t.tempName()
	if err := sys.InDir(t.Temp, func() error { return sys.WriteNew(unix.AT_FDCWD, temp, raw) }); err != nil {
		return again, t.Error(v, "written", err)
	}
	failpoint.Hit(t.Name + "-rewritten")
	if err := unix.Rename(temp, file); err != nil {
		_ = unix.Unlink(temp)
		if errors.Is(err, unix.ENOENT) {
			return again, nil
		}
		return again, t.Error(v, "replaced", err)
	}
	return written, nil
}

// Remove removes a directory of ours with all files in it.
func (t *Tree) Remove(v *volume.Volume, dir string) error {
	temp := t.tempName()
	if err := sys.InDir(t.Temp, func() error { return unix.Rename(t.Path(dir), temp) }); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return t.Error(v, "taken away", err)
	}
	failpoint.Hit(t.Name + "-taken-away")
	t.discard(temp)
	return nil
}

// discard removes a directory in Temp. If it cannot, it logs that; the next start tries again.
func (t *Tree) discard(temp string) {
	err := unix.Unlink(temp + "/" + t.File)
	if err == nil || errors.Is(err, unix.ENOENT) {
		err = sys.UnlessMissing(unix.Rmdir(temp))
	}
	if errors.Is(err, unix.ENOTEMPTY) {
		err = removeFlat(temp)
	}
	if err != nil {
		t.Log.Warn("a leftover directory cannot be removed", zap.String("path", temp), zap.Error(err))
	}
}

// Error is the error if something could not be done with a volume's directory. verb is the participle for the text.
func (t *Tree) Error(v *volume.Volume, verb string, err error) error {
	kind := volume.DiskKind(err)
	hint := ""
	if kind == volume.Exhausted {
		hint = "; free some room on that filesystem"
	}
	return volume.Errorf(kind, "volume %s: %s below %s cannot be %s: %w%s", v.Target, t.What, t.Root, verb, err, hint)
}

// removeFlat removes a directory of files. It does not descend: it removes an empty
// sub-directory, and fails at any other.
func removeFlat(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return sys.UnlessMissing(err)
	}
	for _, entry := range entries {
		if err := sys.UnlessMissing(os.Remove(filepath.Join(dir, entry.Name()))); err != nil {
			return err
		}
	}
	return sys.UnlessMissing(unix.Rmdir(dir))
}

// ReadNames lists a directory, at most limit names of it.
func ReadNames(dir string, limit int) ([]string, error) {
	//nolint:gosec // the directories come from the configuration, or were checked
	file, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	names, err := file.Readdirnames(limit)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return names, err
}

// DeviceIn returns the device that a volume's file names, whatever else is in it: the device
// has an owner even if we cannot serve the volume.
func DeviceIn(raw []byte) volume.Device {
	var info struct {
		Device string `json:"device"`
	}
	if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&info); err != nil || !path.IsAbs(info.Device) {
		return volume.Device{}
	}
	return claim.Identify(path.Clean(info.Device))
}
