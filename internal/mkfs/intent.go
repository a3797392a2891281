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

// work is what was begun on a filesystem and must be brought to its end before anybody
// gets it.
type work string

const (
	workMaking  work = "making"  // its root directory lacks its mode
	workGrowing work = "growing" // resize2fs was started
)

// intent is the file that says what was begun on a volume. It lies beside the lock file, where
// no guest can write: what a filesystem says of itself makes us run nothing.
type intent string

// intentOf returns the intent of the volume with this id, for a daemon with this lock file.
func intentOf(lockFile, id string) intent {
	return intent(filepath.Join(filepath.Dir(lockFile), "unfinished", fmt.Sprintf("%x", sha256.Sum256([]byte(id)))))
}

// begin puts on record what is begun on the filesystem with this UUID.
func (i intent) begin(w work, uuid string) error {
	err := os.MkdirAll(filepath.Dir(string(i)), 0o700)
	if err == nil {
		err = os.WriteFile(string(i), []byte(string(w)+" "+uuid), 0o600)
	}
	if err != nil {
		return fmt.Errorf("nothing is written to it, because that cannot be put on record: %w", err)
	}
	return nil
}

func (i intent) end() error {
	if err := os.Remove(string(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("what was done to it stays on record: %w", err)
	}
	return nil
}

// begun returns what was begun, and on the filesystem with which UUID. That of another one is
// of what the volume had before.
func (i intent) begun() (w work, uuid string, err error) {
	raw, err := os.ReadFile(string(i))
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", fmt.Errorf("what was begun on it is not known: %w", err)
	}
	what, uuid, _ := strings.Cut(string(raw), " ")
	return work(what), uuid, nil
}
