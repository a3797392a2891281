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

// groups are the lines of the guest's list: modules that are loaded together, each with what
// it needs. Boot is loaded at once, the others when such a filesystem is mounted. Where the
// kernel lacks one, the line is left out, but for that of Boot.
var groups = []struct {
	name    string
	modules []string
}{
	{Boot, []string{"virtio_pci", "virtio_blk", "virtio_console"}},
	{"virtiofs", []string{"virtiofs"}},
	{"ext4", []string{"ext4"}},
	{"xfs", []string{"xfs"}},
	{"btrfs", []string{"btrfs"}},
	{"overlay", []string{"overlay"}},
}

// addModules adds the files and the list of them.
func (a *archive) addModules(k kernel) error {
	known, err := k.table()
	if err != nil {
		return err
	}
	var list strings.Builder
	have := make(map[string]bool)
	for _, group := range groups {
		files, err := known.order(group.modules)
		if errors.Is(err, errNoModule) && group.name != Boot {
			continue
		}
		if err != nil {
			return err
		}
		list.WriteString(group.name)
		for _, file := range files {
			list.WriteString(" " + filepath.Base(file))
			if have[file] {
				continue
			}
			have[file] = true
			data, err := os.ReadFile(filepath.Join(k.modules, file)) //nolint:gosec // by the operator's configuration
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

// Build makes the archive of a sandbox's guest, of a static program and modules of a kernel,
// in a directory under a name that tells its content, and gives the paths of the kernel and
// of the archive. One that is there already stays as it is: guests may be using it.
func Build(kernelDir, program, cacheDir string) (image, path string, err error) {
	k, err := findKernel(kernelDir)
	if err != nil {
		return "", "", err
	}
	init, err := os.ReadFile(program) //nolint:gosec // by the operator's configuration
	if err != nil {
		return "", "", fmt.Errorf("read the guest's program: %w", err)
	}
	var a archive
	for _, dir := range []string{"dev", "proc", "sys", "run", "tmp", "mnt", moduleDir} {
		a.add(dir, unix.S_IFDIR|0o755, 0, 0, nil)
	}
	// The program writes there before it has mounted anything.
	a.add("dev/console", unix.S_IFCHR|0o600, 5, 1, nil)
	a.add("init", unix.S_IFREG|0o755, 0, 0, init)
	if err := a.addModules(k); err != nil {
		return "", "", fmt.Errorf("the modules of %s: %w", k.modules, err)
	}
	raw := a.bytes()
	path = filepath.Join(cacheDir, fmt.Sprintf("initramfs-%x", sha256.Sum256(raw)))
	if info, err := os.Stat(path); err == nil && info.Size() == int64(len(raw)) {
		return k.image, path, nil
	}
	return k.image, path, write(path, raw)
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
