package initramfs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// groups are modules that are loaded together, with their dependencies: Boot when the guest boots, the others when such
// a filesystem is mounted. If the kernel lacks a module, the group is left out, unless it is Boot.
var groups = []struct {
	name    string
	modules []string
}{
	{Boot, []string{"virtio_pci", "virtio_blk", "virtio_console"}},
	{"virtiofs", []string{"virtiofs"}},
	{"ext4", []string{"ext4"}},
	{"xfs", []string{"xfs"}},
	{"btrfs", []string{"btrfs"}},
}

// addModules adds the modules and their list.
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

// Build builds the archive from a static program and the modules of a kernel. It returns the
// paths of the kernel and of the archive, whose name in cacheDir is a hash of its content. An
// archive that exists is not written again: guests may be using it.
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
	// The program writes to it before it has mounted /dev.
	a.add("dev/console", unix.S_IFCHR|0o600, 5, 1, nil)
	a.add("init", unix.S_IFREG|0o755, 0, 0, init)
	if err := a.addModules(k); err != nil {
		return "", "", fmt.Errorf("the modules of %s: %w", k.modules, err)
	}
	raw := a.bytes()
	path = filepath.Join(cacheDir, fmt.Sprintf("initramfs-%x", sha256.Sum256(raw)))
	all, _ := filepath.Glob(cacheDir + "/*initramfs-*")
	for _, old := range all {
		if info, err := os.Stat(old); err == nil && old != path && time.Since(info.ModTime()) > unusedTime {
			_ = os.Remove(old) // the next build tries again
		}
	}
	if info, err := os.Stat(path); err == nil && info.Size() == int64(len(raw)) {
		now := time.Now()
		return k.image, path, os.Chtimes(path, now, now) // it is in use
	}
	return k.image, path, write(path, raw)
}

// unusedTime is how long archives of other versions, and incomplete ones, stay.
const unusedTime = 24 * time.Hour

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
		return errors.Join(fmt.Errorf("write the initramfs: %w", err), os.Remove(file.Name()))
	}
	return nil
}
