package doctor

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// katasDefault is the file that Kata reads if containerd's ConfigPath names none.
const katasDefault = "configuration.toml"

func checkKataConfig(_ context.Context, n Node, d Daemon) (found []Finding) {
	files := findKataConfigs(n)
	for _, file := range files {
		found = append(found, file.check(n)...)
	}
	switch {
	case len(files) > 0:
		raw, err := n.read("/opt/kata/VERSION") // which Kata's own installer makes
		version := strings.TrimSpace(string(raw))
		return orOK(found, "%d Kata configuration files%s let block devices through", len(files),
			show.When(err == nil && versionForm.MatchString(version), " of Kata "+version))
	case n.Service.InPod:
		return []Finding{skipped("not looked at: Kata's configuration on the node cannot be seen from this pod")}
	case d.has("kata"):
		return []Finding{warning("install Kata, or set handlers.kata.enabled to false in crust-proxy's configuration",
			"handler kata is configured, and no Kata configuration file is on this node")}
	}
	return []Finding{okay("no Kata configuration file is on this node")}
}

var versionForm = regexp.MustCompile(`^[0-9][0-9A-Za-z.+-]{0,40}$`)

func (c kataConfig) check(n Node) (found []Finding) {
	files := append([]string{c.real}, n.glob(filepath.Join(filepath.Dir(c.real), "config.d/*"))...)
	effective := n.effective(files, func(file string, err error) {
		found = append(found, failure("put the file right: Kata refuses it too, and with it every pod", "%s cannot be read: %v", file, err))
	})
	for _, key := range slices.Sorted(maps.Keys(effective)) {
		found = append(found, c.checkSetting(effective[key])...)
	}
	return found
}

func (c kataConfig) checkSetting(s setting) []Finding {
	if !s.value {
		return nil
	}
	link := show.When(c.path != c.real, " (which "+c.path+" leads to)")
	where := fmt.Sprintf("%s:%d", s.file, s.line) + show.Either(s.file != c.real, " (a drop-in of "+c.path+")", link)
	switch s.key {
	case "disable_block_device_use":
		return []Finding{c.blockDisabled(s, where)}
	case "rootless":
		return []Finding{warning(fmt.Sprintf("set rootless = false in %s:%d", s.file, s.line),
			"%s: [%s] rootless = true: the VMM's sockets are then under /run/user/<uid>, where crust-proxy does not look: such sandboxes are refused", where, s.table)}
	}
	return nil
}

func (c kataConfig) blockDisabled(s setting, where string) Finding {
	do := fmt.Sprintf("set disable_block_device_use = false in %s:%d, or in a drop-in %s; pods made from then on have it",
		s.file, s.line, filepath.Join(filepath.Dir(c.real), "config.d", "99-crust.toml"))
	seen := fmt.Sprintf("%s: [%s] disable_block_device_use = true: Kata's Go runtime skips direct volumes with a mere warning, and the container "+
		"gets the guard, on which every write fails; runtime-rs fails the container with \"unsupported driver type\"", where, s.table)
	switch {
	case c.usedBy != "":
		return failure(do, "%s (runtime %s reads this file)", seen, c.usedBy)
	case c.shadow != "":
		return warning(do, "%s (only where containerd's ConfigPath names this file: else %s is read)", seen, c.shadow)
	case c.unused:
		return warning(do, "%s (no runtime in the configuration of containerd or CRI-O names this file)", seen)
	}
	return failure(do, "%s", seen)
}

// kataConfigDirs are the directories of Kata's configuration files. For a runtime's default
// file, an earlier directory takes precedence.
var kataConfigDirs = []string{
	"/etc/kata-containers",
	"/usr/share/defaults/kata-containers",
	"/usr/share/kata-containers/defaults", // of Fedora's and RHEL's packages
	"/opt/kata/share/defaults/kata-containers",
}

type kataConfig struct {
	// path is its name, and real the file after all links are resolved. Kata reads the drop-ins beside the latter.
	path, real string
	// shadow is the default file that is read instead of it, if any.
	shadow string
	// usedBy is the runtime of containerd or CRI-O that names the file, if any.
	usedBy string
	// unused is set if the runtimes are known, each of them names another file, and this file is not read by default.
	unused bool
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
			add(kataConfig{path: r.config, usedBy: r.name})
		}
	}
	// In each directory the default file is the first, because that is the name that people know. kata-deploy writes
	// others below it: one directory for each of its own runtimes, and for each custom one.
	for _, sub := range []string{"/", "/runtime-rs/"} {
		first := ""
		for _, dir := range kataConfigDirs {
			for _, path := range n.glob(dir+sub+katasDefault, dir+sub+"configuration?*.toml",
				dir+sub+"runtimes/*/configuration*.toml", dir+sub+"custom-runtimes/*/configuration*.toml") {
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

type kataRuntime struct {
	name string
	// config is the file that it names; empty is Kata's default.
	config string
}

// containerdConfigs are containerd's main files: its own, and those of k3s and RKE2.
var containerdConfigs = []string{
	"/etc/containerd/config.toml",
	"/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
	"/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
}

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

func imports(n Node, from string, list any) (files []string) {
	patterns, _ := list.([]any)
	for _, p := range patterns {
		pattern, _ := p.(string)
		files = append(files, n.glob(show.Either(filepath.IsAbs(pattern), pattern, filepath.Join(filepath.Dir(from), pattern)))...)
	}
	return files
}

// kataRuntimesIn finds the tables of runtimes, whose place differs between the versions of containerd, and CRI-O.
func kataRuntimesIn(table map[string]any) (found []kataRuntime) {
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

// kataRuntimeOf reads one runtime. Other runtimes, such as gVisor's, have a ConfigPath too.
func kataRuntimeOf(name string, table any) (kataRuntime, bool) {
	settings, _ := table.(map[string]any)
	options, _ := settings["options"].(map[string]any)
	text := func(from map[string]any, key string) string { s, _ := from[key].(string); return s }
	binary := text(settings, "runtime_path")
	r := kataRuntime{name: name, config: cmp.Or(text(options, "ConfigPath"), text(settings, "runtime_config_path"))}
	kata := strings.HasPrefix(text(settings, "runtime_type"), "io.containerd.kata") || strings.Contains(filepath.Base(binary), "kata")
	return r, kata
}

// setting is one boolean of a TOML file and the line it is on.
type setting struct {
	// table is the dotted name of the table that holds the key.
	table string
	key   string
	value bool
	file  string
	line  int
}

// effective returns the booleans of TOML files, by the result of key for their table and key. A
// later file overrides an earlier one. failed is called for files that cannot be read.
func (n Node) effective(files []string, failed func(file string, err error)) map[string]setting {
	all := map[string]setting{}
	for _, file := range files {
		var settings []setting
		data, err := n.read(file)
		if err == nil {
			settings, err = booleans(file, data)
		}
		if err != nil {
			failed(file, err)
			continue
		}
		for _, s := range settings {
			all[key(s.table, s.key)] = s
		}
	}
	return all
}

func key(table, key string) string { return table + "\x00" + key }

// booleans finds every boolean of a TOML document, however it is written: below a table's heading, with a dotted key,
// or in an inline table.
func booleans(file string, data []byte) (found []setting, err error) {
	var whole map[string]any
	if err := toml.Unmarshal(data, &whole); err != nil {
		return nil, err
	}
	var walk func(table string, in map[string]any)
	walk = func(table string, in map[string]any) {
		for key, value := range in {
			switch value := value.(type) {
			case bool:
				found = append(found, setting{table: table, key: key, value: value, file: file, line: lineOf(data, table, key, value)})
			case map[string]any:
				walk(strings.TrimPrefix(table+"."+key, "."), value)
			}
		}
	}
	walk("", whole)
	return found, nil
}

// lineOf finds the line of a boolean: the first one after the heading of its table, if that has one.
func lineOf(data []byte, table, key string, value bool) int {
	from := max(0, bytes.Index(data, []byte("["+table+"]")))
	line := regexp.MustCompile(fmt.Sprintf(`(?m)^[^#\n]*\b%s\s*=\s*%v`, regexp.QuoteMeta(key), value))
	if at := line.FindIndex(data[from:]); at != nil {
		from += at[1]
	}
	return bytes.Count(data[:from], []byte("\n")) + 1
}
