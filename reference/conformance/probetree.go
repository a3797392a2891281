package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// The files of a tree to which a pod's fsGroup is applied.
const (
	plainFile = "file"
	setIDFile = "setid"
	directory = "dir"
	innerFile = "dir/inner"
	linkFile  = "link"
	fixedFile = "fixed"
)

// plantTree makes them, owned by root.
func plantTree(root string) error {
	if err := os.Mkdir(filepath.Join(root, directory), 0o700); err != nil {
		return err
	}
	for name, mode := range map[string]uint32{plainFile: 0o600, setIDFile: 0o4755, innerFile: 0o604} {
		path := filepath.Join(root, name)
		if err := os.WriteFile(path, []byte(name), 0o600); err != nil {
			return err
		}
		if err := unix.Chmod(path, mode); err != nil {
			return err
		}
	}
	return nil
}

// own gives a file an owner, a group and a mode.
func own(path string, words []string) error {
	if len(words) != 3 {
		return errors.New("uid, gid and mode are needed")
	}
	uid, errUID := strconv.Atoi(words[0])
	gid, errGID := strconv.Atoi(words[1])
	mode, errMode := strconv.ParseUint(words[2], 8, 12)
	if err := errors.Join(errUID, errGID, errMode); err != nil {
		return err
	}
	if err := os.Lchown(path, uid, gid); err != nil {
		return err
	}
	if err := unix.Chmod(path, uint32(mode)); err != nil {
		return fmt.Errorf("chmod %s: %w", path, err)
	}
	return nil
}

// immutable is FS_IMMUTABLE_FL of the kernel's linux/fs.h.
const immutable = 0x10

// fix makes an immutable file.
func fix(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600) //nolint:gosec // a file of the test's
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := unix.IoctlSetPointerInt(int(file.Fd()), unix.FS_IOC_SETFLAGS, immutable); err != nil {
		return fmt.Errorf("make %s immutable: %w", path, err)
	}
	return nil
}

// swapTime is how long a workload swaps.
const swapTime = 2 * time.Second

// swap exchanges a directory and a link that leads out of the volume, as fast as it can.
func swap(path string) error {
	link := path + ".link"
	if err := os.Symlink("../../../..", link); err != nil {
		return err
	}
	for end := time.Now().Add(swapTime); time.Now().Before(end); {
		if err := unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE); err != nil {
			return err
		}
	}
	return nil
}
