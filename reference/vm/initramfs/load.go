package initramfs

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// List reads in the guest what the archive has: names and the files to load for them.
func List() (names []string, files map[string][]string, err error) {
	file, err := os.Open("/" + ModuleList)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = file.Close() }()
	files = make(map[string][]string)
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if words := strings.Fields(lines.Text()); len(words) > 0 {
			names = append(names, words[0])
			files[words[0]] = words[1:]
		}
	}
	return names, files, lines.Err()
}

// Load loads in the guest what belongs to a name. What is loaded already stays.
func Load(name string) error {
	_, files, err := List()
	if err != nil {
		return err
	}
	for _, file := range files[name] {
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
