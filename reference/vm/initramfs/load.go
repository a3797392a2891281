package initramfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNotListed means that the archive has no modules of this name.
var ErrNotListed = errors.New("the guest has no modules for it")

// Load loads a group of modules in the guest, except for those that are loaded.
func Load(name string) error {
	list, err := os.ReadFile("/" + moduleList)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(list)) {
		files := strings.Fields(line)
		if len(files) == 0 || files[0] != name {
			continue
		}
		for _, file := range files[1:] {
			if err := loadModule(filepath.Join("/", moduleDir, file)); err != nil {
				return fmt.Errorf("load %s: %w", file, err)
			}
		}
		return nil
	}
	return ErrNotListed
}

func loadModule(path string) error {
	file, err := os.Open(path) //nolint:gosec // from the archive
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	flags := 0
	if !strings.HasSuffix(path, ".ko") {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	err = unix.FinitModule(int(file.Fd()), "", flags)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}
