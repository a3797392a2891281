package mkfs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// work is what was begun on a filesystem and must be completed before a sandbox gets it.
type work string

const (
	workMaking  work = "making"  // its root directory lacks its mode
	workGrowing work = "growing" // resize2fs was started
)

// intent is the file that records what was begun on a volume. It is in the directory of the lock
// file, where no guest can write: the contents of a filesystem never decide which program runs.
type intent string

// intentOf returns the intent of the volume with this id, for a daemon with this lock file.
func intentOf(lockFile, id string) intent {
	return intent(filepath.Join(filepath.Dir(lockFile), "unfinished", fmt.Sprintf("%x", sha256.Sum256([]byte(id)))))
}

// begin records what is begun on the filesystem with this UUID.
func (i intent) begin(w work, uuid string) error {
	err := os.MkdirAll(filepath.Dir(string(i)), 0o700)
	if err == nil {
		err = os.WriteFile(string(i), []byte(string(w)+" "+uuid), 0o600)
	}
	if err != nil {
		return fmt.Errorf("nothing was written to it, because the intent cannot be recorded: %w", err)
	}
	return nil
}

func (i intent) end() error {
	if err := os.Remove(string(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("its intent is complete but cannot be removed: %w", err)
	}
	return nil
}

// begun returns what was begun, and the UUID of the filesystem. An intent for another UUID is for
// an earlier filesystem of the volume.
func (i intent) begun() (w work, uuid string, err error) {
	raw, err := os.ReadFile(string(i))
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("it is not known whether mkfs or resize2fs was interrupted on it: %w", err)
	}
	what, uuid, _ := strings.Cut(string(raw), " ")
	return work(what), uuid, nil
}
