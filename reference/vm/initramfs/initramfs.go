package initramfs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Modules is a line of the guest's list: modules that are loaded together. Where the kernel
// lacks one, the line is left out, but for that of Boot.
type Modules struct {
	// Name is what the guest calls them.
	Name string
	// Modules are their names; each comes with what it needs.
	Modules []string
}

// Guest is what the guest of a sandbox loads: Boot at once, the others when a volume has
// such a filesystem.
func Guest() []Modules {
	return []Modules{
		{Name: Boot, Modules: []string{"virtio_pci", "virtio_blk", "virtio_console", "virtiofs"}},
		{Name: "ext4", Modules: []string{"ext4"}},
		{Name: "xfs", Modules: []string{"xfs"}},
		{Name: "btrfs", Modules: []string{"btrfs"}},
	}
}

// Archive makes the archive: a static program, and modules of a kernel.
func Archive(kernel Kernel, program string, modules []Modules) ([]byte, error) {
	init, err := os.ReadFile(program) //nolint:gosec // by the operator's configuration
	if err != nil {
		return nil, fmt.Errorf("read the guest's program: %w", err)
	}
	var a archive
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp", "mnt", moduleDir} {
		a.add(dir, unix.S_IFDIR|0o755, 0, 0, nil)
	}
	// The program writes there before it has mounted anything.
	a.add("dev/console", unix.S_IFCHR|0o600, 5, 1, nil)
	a.add("init", unix.S_IFREG|0o755, 0, 0, init)
	if err := a.modules(kernel, modules); err != nil {
		return nil, fmt.Errorf("the modules of %s: %w", kernel.modules, err)
	}
	return a.bytes(), nil
}

// modules adds the files and the list of them.
func (a *archive) modules(kernel Kernel, groups []Modules) error {
	known, err := kernel.table()
	if err != nil {
		return err
	}
	var list strings.Builder
	have := make(map[string]bool)
	for _, group := range groups {
		files, err := known.order(group.Modules)
		if errors.Is(err, errNoModule) && group.Name != Boot {
			continue
		}
		if err != nil {
			return err
		}
		list.WriteString(group.Name)
		for _, file := range files {
			list.WriteString(" " + filepath.Base(file))
			if have[file] {
				continue
			}
			have[file] = true
			data, err := os.ReadFile(filepath.Join(kernel.modules, file)) //nolint:gosec // as above
			if err != nil {
				return err
			}
			a.add(moduleDir+"/"+filepath.Base(file), unix.S_IFREG|0o644, 0, 0, data)
		}
		list.WriteByte('\n')
	}
	a.add(moduleList, unix.S_IFREG|0o644, 0, 0, []byte(list.String()))
	return nil
}

// Build makes the archive of a sandbox's guest in a directory, under a name that tells
// its content, and gives the paths of the kernel and of the archive. One that is there
// already stays as it is: guests may be using it.
func Build(kernelDir, program, cacheDir string) (image, path string, err error) {
	kernel, err := FindKernel(kernelDir)
	if err != nil {
		return "", "", err
	}
	raw, err := Archive(kernel, program, Guest())
	if err != nil {
		return "", "", err
	}
	path = filepath.Join(cacheDir, fmt.Sprintf("initramfs-%x", sha256.Sum256(raw)))
	if info, err := os.Stat(path); err == nil && info.Size() == int64(len(raw)) {
		return kernel.Image, path, nil
	}
	return kernel.Image, path, write(path, raw)
}

// write makes a file that is whole or not there.
func write(path string, raw []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".initramfs-*")
	if err != nil {
		return err
	}
	_, err = file.Write(raw)
	if err = errors.Join(err, file.Chmod(0o644), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("keep the initramfs: %w", err), os.Remove(file.Name()))
	}
	return nil
}
