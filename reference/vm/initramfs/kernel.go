package initramfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

type kernel struct{ image, modules string }

// findKernel finds the only kernel in a directory that is laid out like the root of a Debian
// system: boot/vmlinuz-RELEASE and lib/modules/RELEASE.
func findKernel(dir string) (kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot/vmlinuz-*"))
	if err != nil {
		return kernel{}, err
	}
	if len(images) != 1 {
		return kernel{}, fmt.Errorf("%s has %d kernels boot/vmlinuz-*, and must have one", dir, len(images))
	}
	_, release, _ := strings.Cut(filepath.Base(images[0]), "-")
	modules := filepath.Join(dir, "lib/modules", release)
	if _, err := os.Stat(filepath.Join(modules, "modules.dep")); err != nil {
		return kernel{}, fmt.Errorf("the kernel %s has no modules (run `depmod -b %s %s`?): %w", images[0], dir, release, err)
	}
	return kernel{image: images[0], modules: modules}, nil
}

var errNoModule = errors.New("the kernel has no such module")

// table describes a kernel's modules: the file of each module, which is empty if the module is
// built in, and the files on which each file depends.
type table struct {
	files map[string]string
	needs map[string][]string
}

func (k kernel) table() (*table, error) {
	t := &table{files: make(map[string]string), needs: make(map[string][]string)}
	raw, err := os.ReadFile(filepath.Join(k.modules, "modules.dep"))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(raw)) {
		file, needs, _ := strings.Cut(line, ":")
		t.files[moduleName(file)] = file
		t.needs[file] = strings.Fields(needs)
	}
	raw, err = os.ReadFile(filepath.Join(k.modules, "modules.builtin"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(raw)) {
		t.files[moduleName(line)] = ""
	}
	return t, nil
}

// order returns the files of modules, each once, in the order of loading. A built-in module has no file.
func (t *table) order(names []string) ([]string, error) {
	var order []string
	for _, name := range names {
		file, found := t.files[name]
		if !found {
			return nil, fmt.Errorf("%s: %w", name, errNoModule)
		}
		if file == "" {
			continue
		}
		// depmod lists all dependencies of a module, in the reverse order of loading.
		for _, needed := range slices.Backward(append([]string{file}, t.needs[file]...)) {
			if !slices.Contains(order, needed) {
				order = append(order, needed)
			}
		}
	}
	return order, nil
}

// moduleName returns the name of a module by its file. The kernel treats - and _ alike.
func moduleName(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}
