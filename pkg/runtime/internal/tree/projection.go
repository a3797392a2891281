package tree

import (
	"bytes"
	"errors"
	"os"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const maxFile = 64 << 10

// Projection is the directory that a volume shall have.
type Projection struct {
	Volume *volume.Volume
	// Dir is the name of its directory, and Raw what its file holds.
	Dir string
	Raw []byte
	// Built is called with the path of a new directory before anybody else can reach it.
	// Dropped is called if that could not be put in place.
	Built   func(path string)
	Dropped func()
}

type outcome uint8

const (
	again   outcome = iota // the directory came or went meanwhile: repeat
	asItWas                // it was right already
	written
)

// Publish makes sure that the volume's directory exists with the right file in it. It never
// puts another file there.
func (t *Tree) Publish(p *Projection) (changed bool, err error) {
	// One retry each way: the directory can come or go between two calls.
	for range 3 {
		done, err := t.publishOnce(p)
		if done != again || err != nil {
			return done == written, err
		}
	}
	return false, volume.Errorf(volume.Busy, "volume %s: another program keeps changing %s: try again", p.Volume.Target, t.Path(p.Dir))
}

func (t *Tree) publishOnce(p *Projection) (outcome, error) {
	whose, key, err := t.OwnerOf(p.Dir)
	if err != nil {
		return again, t.Error(p.Volume, "looked at", err)
	}
	switch {
	case whose == Missing:
		return t.publishNew(p)
	case whose == OwnedByUs && key == p.Volume.Key:
		return t.publishAgain(p)
	default:
		return again, volume.Errorf(volume.Conflict, "volume %s: another program has already published it in %s: "+
			"let that program take it back, or %s", p.Volume.Target, t.Path(p.Dir), t.Remedy)
	}
}

func (t *Tree) publishNew(p *Projection) (outcome, error) {
	temp, err := t.Build(p.Volume.Key, p.Raw)
	if err != nil {
		t.discard(temp)
		return again, t.Error(p.Volume, "built", err)
	}
	p.Built(temp)
	failpoint.Hit(t.Name + "-built")
	err = unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, t.Path(p.Dir), unix.RENAME_NOREPLACE)
	if err == nil {
		return written, nil
	}
	t.discard(temp)
	p.Dropped()
	switch {
	case errors.Is(err, unix.EEXIST):
		return again, nil
	case errors.Is(err, unix.ENOENT):
		// Somebody removed the whole root: make it again.
		return again, t.remake(p.Volume)
	default:
		return again, t.Error(p.Volume, "put in place", err)
	}
}

// Build makes a directory of ours in Temp.
func (t *Tree) Build(key volume.Key, raw []byte) (temp string, err error) {
	temp = t.tempName()
	if err := unix.Mkdir(temp, 0o700); err != nil {
		return temp, err
	}
	failpoint.Hit(t.Name + "-directory-made")
	if err := t.sign(temp, key); err != nil {
		return temp, err
	}
	return temp, sys.WriteNew(unix.AT_FDCWD, temp+"/"+t.File, raw)
}

func (t *Tree) publishAgain(p *Projection) (outcome, error) {
	file := t.Path(p.Dir) + "/" + t.File
	old, err := sys.ReadSmall(file, maxFile)
	if err == nil && bytes.Equal(old, p.Raw) {
		// An older crust-proxy wrote no root. If this fails, the target decides, as before.
		_ = t.sign(t.Path(p.Dir), p.Volume.Key)
		return asItWas, nil
	}
	temp := t.tempName()
	if err := sys.WriteNew(unix.AT_FDCWD, temp, p.Raw); err != nil {
		return again, t.Error(p.Volume, "written", err)
	}
	failpoint.Hit(t.Name + "-rewritten")
	if err := unix.Rename(temp, file); err != nil {
		_ = unix.Unlink(temp)
		if errors.Is(err, unix.ENOENT) {
			return again, nil
		}
		return again, t.Error(p.Volume, "replaced", err)
	}
	return written, nil
}

// Remove removes a directory of ours with all files in it.
func (t *Tree) Remove(v *volume.Volume, dir string) error {
	temp := t.tempName()
	if err := unix.Rename(t.Path(dir), temp); err != nil {
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
		err = ignoreMissing(unix.Rmdir(temp))
	}
	if errors.Is(err, unix.ENOTEMPTY) {
		err = removeFlat(temp)
	}
	if err != nil {
		t.Log.Warn("a leftover directory cannot be removed", zap.String("path", temp), zap.Error(err))
	}
}

func (t *Tree) remake(v *volume.Volume) error {
	for _, dir := range []string{t.Root, t.Temp} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return t.Error(v, "put in place", err)
		}
	}
	return nil
}

// Error is the error if something could not be done with a volume's directory. verb is the
// participle for the text.
func (t *Tree) Error(v *volume.Volume, verb string, err error) error {
	kind := volume.DiskKind(err)
	hint := ""
	if kind == volume.Exhausted {
		hint = "; free some room on that filesystem"
	}
	return volume.Errorf(kind, "volume %s: %s below %s cannot be %s: %w%s", v.Target, t.What, t.Root, verb, err, hint)
}
