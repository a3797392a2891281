package initramfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNotListed is a name that the archive has no modules for.
var ErrNotListed = errors.New("no such modules")

// List reads in the guest what the archive has: the files to load for each name.
func List() (map[string][]string, error) {
	raw, err := os.ReadFile("/" + ModuleList)
	files := make(map[string][]string)
	for line := range strings.Lines(string(raw)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		files[name] = strings.Fields(rest)
	}
	return files, err
}

// Load loads in the guest what belongs to a name. What is loaded already stays.
func Load(name string) error {
	all, err := List()
	if err != nil {
		return err
	}
	files, listed := all[name]
	if !listed {
		return fmt.Errorf("%s: %w", name, ErrNotListed)
	}
	for _, file := range files {
		if err := loadModule(filepath.Join("/", ModuleDir, file)); err != nil {
			return fmt.Errorf("load %s: %w", file, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	file, err := os.Open(path) //nolint:gosec // of our own archive
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
