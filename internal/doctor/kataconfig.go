package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// kataConfigDirs are where Kata's configuration files are, each after the one
// that goes before it when a runtime looks for its default file.
var kataConfigDirs = []string{
	"/etc/kata-containers",
	"/usr/share/defaults/kata-containers",
	"/opt/kata/share/defaults/kata-containers",
}

// katasDefault is the file that is read where containerd's ConfigPath names none.
const katasDefault = "configuration.toml"

func checkKataConfig(_ context.Context, n Node, d Daemon) []Finding {
	var found []Finding
	files := n.kataConfigs()
	for _, file := range files {
		found = append(found, n.kataFile(file)...)
	}
	if len(files) == 0 {
		return []Finding{noKata(d)}
	}
	return orOK(found, "%d Kata configuration files let block devices through", len(files))
}

func noKata(d Daemon) Finding {
	for _, h := range d.Handlers {
		if strings.HasPrefix(h.GetName(), "kata") {
			return warning("install Kata, or take the handler out of the configuration",
				"handler %s is configured, and no Kata configuration file is on this node", h.GetName())
		}
	}
	return okay("no Kata configuration file is on this node")
}

// kataConfig is one main configuration file.
type kataConfig struct {
	// path is its name, real the file that the name leads to: Kata reads the
	// drop-ins that lie beside the latter.
	path, real string
	// shadow is the default file that is read instead of it, if any.
	shadow string
}

// kataConfigs lists the main files of both runtimes, each real file once.
func (n Node) kataConfigs() []kataConfig {
	var all []kataConfig
	seen := map[string]bool{}
	for _, sub := range []string{"", "runtime-rs"} {
		first := ""
		for _, dir := range kataConfigDirs {
			for _, path := range n.glob(filepath.Join(dir, sub), "configuration*.toml") {
				c := kataConfig{path: path, real: n.resolve(path)}
				if filepath.Base(path) == katasDefault {
					c.shadow = first
					first = firstOf(first, path)
				}
				if !seen[c.real] {
					seen[c.real] = true
					all = append(all, c)
				}
			}
		}
	}
	return all
}

func firstOf(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// glob lists a directory's files of a pattern, the default file first, as it is
// the name under which people look for it.
func (n Node) glob(dir, pattern string) []string {
	entries, err := os.ReadDir(n.at(dir))
	if err != nil {
		return nil // a directory that is not there holds no configuration
	}
	var paths []string
	for _, e := range entries {
		if ok, _ := filepath.Match(pattern, e.Name()); ok { // the pattern is constant and well formed
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	sort.SliceStable(paths, func(i, j int) bool {
		return filepath.Base(paths[i]) == katasDefault && filepath.Base(paths[j]) != katasDefault
	})
	return paths
}

func (n Node) kataFile(c kataConfig) []Finding {
	var found []Finding
	effective := map[string]setting{}
	for _, file := range append([]string{c.real}, n.glob(filepath.Join(filepath.Dir(c.real), "config.d"), "*")...) {
		settings, err := n.kataSettings(file)
		if err != nil {
			found = append(found, failure("put the file right: Kata refuses it too, and with it every pod", "%s cannot be read: %v", file, err))
			continue
		}
		for _, s := range settings {
			effective[s.table+"\x00"+s.key] = s // a later file goes before an earlier one
		}
	}
	for _, key := range sortedKeys(effective) {
		if f, bad := kataSettingFinding(c, effective[key]); bad {
			found = append(found, f)
		}
	}
	return found
}

func (n Node) kataSettings(file string) ([]setting, error) {
	data, err := n.read(file)
	if err != nil {
		return nil, err
	}
	return booleans(file, data)
}

func kataSettingFinding(c kataConfig, s setting) (Finding, bool) {
	if !s.value {
		return Finding{}, false
	}
	where := fmt.Sprintf("%s:%d", s.file, s.line)
	if s.file != c.real {
		where += " (a drop-in of " + c.path + ")"
	} else if c.path != c.real {
		where += " (which " + c.path + " leads to)"
	}
	switch s.key {
	case "disable_block_device_use":
		return blockDisabled(c, s, where), true
	case "rootless":
		return warning(fmt.Sprintf("set rootless = false in %s:%d", s.file, s.line),
			"%s: [%s] rootless = true: the VMM's sockets are then under /run/user/<uid>, where crust-proxy does not look: such sandboxes are refused", where, s.table), true
	}
	return Finding{}, false
}

func blockDisabled(c kataConfig, s setting, where string) Finding {
	do := fmt.Sprintf("set disable_block_device_use = false in %s:%d, or in a drop-in %s; pods made from then on have it",
		s.file, s.line, filepath.Join(filepath.Dir(c.real), "config.d", "99-crust.toml"))
	seen := fmt.Sprintf("%s: [%s] disable_block_device_use = true: Kata skips direct volumes with a mere warning", where, s.table)
	if c.shadow != "" {
		return warning(do, "%s (only where containerd's ConfigPath names this file: else %s is read)", seen, c.shadow)
	}
	return failure(do, "%s", seen)
}
