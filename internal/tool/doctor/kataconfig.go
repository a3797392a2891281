package doctor

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
)

// katasDefault is the file that Kata reads if containerd's ConfigPath names none.
const katasDefault = "configuration.toml"

func checkKataConfig(_ context.Context, n Node, d Daemon) []Finding {
	var found []Finding
	files := findKataConfigs(n)
	for _, file := range files {
		found = append(found, file.check(n)...)
	}
	switch {
	case len(files) > 0:
		return orOK(found, "%d Kata configuration files let block devices through", len(files))
	case d.has("kata"):
		return []Finding{warning("install Kata, or take the handler out of the configuration",
			"handler kata is configured, and no Kata configuration file is on this node")}
	}
	return []Finding{okay("no Kata configuration file is on this node")}
}

func (c kataConfig) check(n Node) []Finding {
	var found []Finding
	files := append([]string{c.real}, n.glob(filepath.Join(filepath.Dir(c.real), "config.d/*"))...)
	effective := n.effective(files, func(file string, err error) {
		found = append(found, failure("put the file right: Kata refuses it too, and with it every pod", "%s cannot be read: %v", file, err))
	})
	for _, key := range slices.Sorted(maps.Keys(effective)) {
		found = append(found, c.checkSetting(n, effective[key])...)
	}
	return found
}

func (c kataConfig) checkSetting(n Node, s setting) []Finding {
	if !s.value {
		return nil
	}
	where := fmt.Sprintf("%s:%d", s.file, s.line)
	if s.file != c.real {
		where += " (a drop-in of " + c.path + ")"
	} else if c.path != c.real {
		where += " (which " + c.path + " leads to)"
	}
	switch s.key {
	case "disable_block_device_use":
		return []Finding{c.blockDisabled(n, s, where)}
	case "rootless":
		return []Finding{warning(fmt.Sprintf("set rootless = false in %s:%d", s.file, s.line),
			"%s: [%s] rootless = true: the VMM's sockets are then under /run/user/<uid>, where crust-proxy does not look: such sandboxes are refused", where, s.table)}
	}
	return nil
}

// blockDisabled describes the effect of the setting, which differs between the two runtimes.
func (c kataConfig) blockDisabled(n Node, s setting, where string) Finding {
	do := fmt.Sprintf("set disable_block_device_use = false in %s:%d, or in a drop-in %s; pods made from then on have it",
		s.file, s.line, filepath.Join(filepath.Dir(c.real), "config.d", "99-crust.toml"))
	effect := "the Go runtime skips direct volumes with a mere warning, and the container gets the guard, on which every write fails"
	if c.isRuntimeRS(n) {
		effect = `runtime-rs fails the container with "unsupported driver type"`
	}
	seen := fmt.Sprintf("%s: [%s] disable_block_device_use = true: %s", where, s.table, effect)
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
