package doctor

import (
	"cmp"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// kataConfigDirs are the directories of Kata's configuration files. For a runtime's default
// file, an earlier directory takes precedence.
var kataConfigDirs = []string{
	"/etc/kata-containers",
	"/usr/share/defaults/kata-containers",
	"/opt/kata/share/defaults/kata-containers",
}

type kataConfig struct {
	// path is its name, and real the file after all links are resolved. Kata reads the drop-ins
	// beside the latter.
	path, real string
	// shadow is the default file that is read instead of it, if any.
	shadow string
	// usedBy is the runtime of containerd or CRI-O that names the file, if any.
	usedBy string
	// unused is set if the runtimes are known, each of them names another file, and this file
	// is not read by default.
	unused bool
	// rust is set if the runtime that names the file is runtime-rs.
	rust bool
}

// findKataConfigs lists the main files of both runtimes, each real file once: those that
// containerd or CRI-O names, wherever they are, and those in the usual directories.
func findKataConfigs(n Node) []kataConfig {
	runtimes := kataRuntimes(n)
	var all []kataConfig
	seen := map[string]bool{}
	add := func(c kataConfig) {
		c.real = n.resolve(c.path)
		if !seen[c.real] {
			seen[c.real] = true
			all = append(all, c)
		}
	}
	for _, r := range runtimes {
		if r.config != "" {
			add(kataConfig{path: r.config, usedBy: r.name, rust: r.rust})
		}
	}
	for _, sub := range []string{"", "runtime-rs"} {
		first := ""
		for _, dir := range kataConfigDirs {
			for _, path := range kataFilesIn(n, filepath.Join(dir, sub)) {
				c := kataConfig{path: path, unused: len(runtimes) > 0}
				if filepath.Base(path) == katasDefault {
					c.shadow, c.unused = first, false
					first = cmp.Or(first, path)
				}
				add(c)
			}
		}
	}
	return all
}

// kataFilesIn lists the files of a directory, the default one first, because that is the name
// that people know. It includes those that kata-deploy writes below it: one directory for each
// of its own runtimes, and for each custom one.
func kataFilesIn(n Node, dir string) []string {
	return n.glob(dir+"/"+katasDefault, dir+"/configuration?*.toml", dir+"/runtimes/*/configuration*.toml", dir+"/custom-runtimes/*/configuration*.toml")
}

// isRuntimeRS reports whether runtime-rs reads a file. Only its own files name the hypervisor
// in the table [runtime].
func (c kataConfig) isRuntimeRS(n Node) bool {
	if c.rust || strings.Contains(c.path, "runtime-rs") || strings.Contains(c.real, "runtime-rs") {
		return true
	}
	var file struct {
		Runtime struct {
			Hypervisor string `toml:"hypervisor_name"`
		} `toml:"runtime"`
	}
	data, err := n.read(c.real)
	return err == nil && toml.Unmarshal(data, &file) == nil && file.Runtime.Hypervisor != ""
}

// kataRuntime is a runtime of Kata in the configuration of containerd or CRI-O.
type kataRuntime struct {
	name string
	// config is the file that it names; empty is Kata's default.
	config string
	rust   bool
}

// containerdConfigs are containerd's main files: its own, and those of k3s and RKE2.
var containerdConfigs = []string{
	"/etc/containerd/config.toml",
	"/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
	"/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
}

// maxRuntimeFiles bounds the configuration files of container runtimes that are read.
const maxRuntimeFiles = 256

// kataRuntimes reads Kata's runtimes from the configuration of containerd and CRI-O. Files that
// cannot be read are skipped: the files in the usual directories are checked in any case.
func kataRuntimes(n Node) []kataRuntime {
	crio, _ := crioFiles(n)
	files := append(slices.Clone(containerdConfigs), crio...)
	var found []kataRuntime
	for i := 0; i < min(len(files), maxRuntimeFiles); i++ {
		data, err := n.read(files[i])
		var doc map[string]any
		if err != nil || toml.Unmarshal(data, &doc) != nil {
			continue
		}
		files = append(files, imports(n, files[i], doc["imports"])...)
		found = append(found, kataRuntimesIn(doc)...)
	}
	return found
}

// imports are the files that a configuration of containerd includes.
func imports(n Node, from string, list any) (files []string) {
	patterns, _ := list.([]any)
	for _, p := range patterns {
		pattern, _ := p.(string)
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join(filepath.Dir(from), pattern)
		}
		files = append(files, n.glob(pattern)...)
	}
	return files
}

// kataRuntimesIn finds the tables of runtimes, whose place differs between the
// versions of containerd, and CRI-O.
func kataRuntimesIn(table map[string]any) []kataRuntime {
	var found []kataRuntime
	for _, key := range slices.Sorted(maps.Keys(table)) {
		inner, _ := table[key].(map[string]any)
		if key != "runtimes" {
			found = append(found, kataRuntimesIn(inner)...)
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(inner)) {
			if r, ok := kataRuntimeOf(name, inner[name]); ok {
				found = append(found, r)
			}
		}
	}
	return found
}

// kataRuntimeOf reads one runtime. Other runtimes, such as gVisor's, have a ConfigPath
// too.
func kataRuntimeOf(name string, table any) (kataRuntime, bool) {
	settings, _ := table.(map[string]any)
	options, _ := settings["options"].(map[string]any)
	text := func(from map[string]any, key string) string { s, _ := from[key].(string); return s }
	binary := text(settings, "runtime_path")
	r := kataRuntime{name: name, config: cmp.Or(text(options, "ConfigPath"), text(settings, "runtime_config_path"))}
	r.rust = strings.Contains(name+binary, "runtime-rs")
	kata := strings.HasPrefix(text(settings, "runtime_type"), "io.containerd.kata") || strings.Contains(filepath.Base(binary), "kata")
	return r, kata
}
