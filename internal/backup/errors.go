package backup

import (
	"errors"
	"fmt"
)

// ErrExists means that a file exists that would be overwritten.
var ErrExists = errors.New("it exists already: remove it, or name another file")

// errComplete means that a file has what it should have, but perhaps not its name alone.
var errComplete = errors.New("the file is complete")

func notRenamed(part, name string, err error) error {
	return fmt.Errorf("rename %s to %s: %w; %w, and can be renamed by other means", part, name, err, errComplete)
}

func notRemoved(name string, err error) error {
	return fmt.Errorf("%w; %w and has its name, %s: remove the other one", err, errComplete, name)
}

func notSynced(name string, err error) error {
	return fmt.Errorf("sync the directory of %s: %w; %w and has its name, but may lose it in a power failure", name, err, errComplete)
}

// damage says where and how a file differs from what was written.
type damage struct {
	at   int64
	text string
}

func (d *damage) Error() string { return fmt.Sprintf("damaged at byte %d: %s", d.at, d.text) }

func (s *stream) damage(text string) error { return &damage{at: s.good, text: text} }

func notRegular(name string) error {
	return fmt.Errorf("%s is there, and is no regular file: name another file", name)
}

func noDevice(name string) error {
	return fmt.Errorf("there is no device %s, and no file is made in /dev", name)
}

func otherBackup(part string) error {
	return fmt.Errorf("%s is an unfinished backup of another snapshot, base or size: remove it, or name another file", part)
}

func otherSource(from string, at int64) error {
	return fmt.Errorf("it was begun with other data than %s has at byte %d: --from must have the content of the same snapshot. "+
		"Otherwise remove it, or name another file", from, at)
}

func tooSmall(path string, has, needs int64) error {
	return fmt.Errorf("%s has %d bytes, and the volume %d: is it the right one?", path, has, needs)
}

func inUse(path string) error {
	return fmt.Errorf("%s is in use: it is mounted, or claimed by a VM, by LVM or the like. Nothing was written", path)
}

func openedBy(path, who string) error {
	return fmt.Errorf("%s is open in %s. Nothing was written", path, who)
}

func maybeOpened(path string, err error) error {
	return fmt.Errorf("it is not known whether somebody has %s open: try it again. Nothing was written: %w", path, err)
}

func noNode(disk string) error {
	return fmt.Errorf("the partition's disk, %s, has no node in /dev, by which its users are found", disk)
}

func notOurs(part string, has, size int64) error {
	return fmt.Errorf("%s has %d bytes, and the volume %d: no restore of it has left that. Remove it, or name another file", part, has, size)
}

func twoNames(part string) error {
	return fmt.Errorf("%s is also another file, which may be complete: remove this name, which leaves the other, and try again", part)
}

func ofAnother(part string, uid uint32) error {
	return fmt.Errorf("%s belongs to user %d, who could read and change what is written to it: remove it, or name a file in another directory", part, uid)
}

func notFull(path string, h *Header) error {
	return fmt.Errorf("%s is an increment to a backup of snapshot %q: name the full backup first, and then its increments in their order", path, h.Base.Snapshot)
}

func notNext(path, before string, h *Header) error {
	if h.Base == nil {
		return fmt.Errorf("%s is a full backup: it must be the first file", path)
	}
	return fmt.Errorf("%s is an increment to another backup than %s, to one of snapshot %q: give all files from the full backup on, in their order",
		path, before, h.Base.Snapshot)
}

func shrunk(path string, was, is int64) error {
	return fmt.Errorf("%s is of a volume of %d bytes, and the backup before it of %d: volumes do not shrink", path, is, was)
}

func incomplete(target string, err error) error {
	if errors.Is(err, errComplete) {
		return err
	}
	return fmt.Errorf("%s is incomplete now and must not be used: restore again. %w", target, err)
}
