package doctor

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

var (
	// sandboxID is the form of an id in containerd.
	sandboxID = regexp.MustCompile(`^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$`)
	// temporary matches names of temporary files that programs make beside others.
	temporary = regexp.MustCompile(`(?i)tmp|temp|lock|\.(swp|bak|new|old|json)`)
)

func checkKataVolumes(_ context.Context, n Node, _ Daemon) []Finding {
	dir := n.Config.Handlers.Kata.DirectVolumes
	entries, err := os.ReadDir(n.at(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return []Finding{warning("run crustctl doctor as root", "the volumes in %s cannot be listed: %v", dir, err)}
	}
	var found []Finding
	for _, e := range entries {
		found = append(found, checkKataVolume(n, e)...)
	}
	return orOK(found, "%d volumes in %s are well formed", len(entries), dir)
}

type kataVolume struct {
	node         Node
	path, target string
}

func checkKataVolume(n Node, e fs.DirEntry) []Finding {
	path := filepath.Join(n.Config.Handlers.Kata.DirectVolumes, e.Name())
	if !e.IsDir() {
		return []Finding{failure("find out who made it, and remove it", "%q is not a volume's directory", path)}
	}
	target, err := volumePath(e.Name())
	if err != nil {
		return []Finding{failure("its writer must name it by the URL-safe base64, with padding, of the volume's path; remove it when no pod uses it",
			"the name of %q is no volume's: Kata never finds it (%v)", path, err)}
	}
	entries, err := os.ReadDir(n.at(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it was removed meanwhile
	}
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "%q cannot be read: %v", path, err)}
	}
	v := kataVolume{n, path, target}
	return append(v.checkMode(e), v.checkFiles(entries)...)
}

// volumePath decodes a directory's name, and refuses the other base64 alphabets.
func volumePath(name string) (string, error) {
	raw, err := base64.URLEncoding.Strict().DecodeString(name)
	if err != nil {
		return "", err
	}
	if len(raw) == 0 || raw[0] != '/' {
		return "", fmt.Errorf("it decodes to %q, which is no absolute path", raw)
	}
	return string(raw), nil
}

func (v kataVolume) checkMode(e fs.DirEntry) []Finding {
	info, err := e.Info()
	if err != nil || info.Mode().Perm()&0o077 == 0 {
		return nil // it was removed meanwhile
	}
	if sys.IsEmptyDir(v.target) && info.Mode().Perm()&0o022 == 0 {
		return nil // runtime-rs makes them so, and the directory above keeps others out
	}
	return []Finding{warning("chmod 0700 "+quoted(v.path), "the directory of volume %q has mode %04o: others may read or change it", v.target, info.Mode().Perm())}
}

func (v kataVolume) checkFiles(entries []fs.DirEntry) (found []Finding) {
	hasInfo := false
	for _, e := range entries {
		if e.Name() == abi.InfoName {
			hasInfo = true
			found = append(found, v.checkInfo()...)
			continue
		}
		found = append(found, v.checkOther(e)...)
	}
	if !hasInfo {
		found = append(found, warning("where no pod uses it: rm -r "+quoted(v.path), "volume %q has a directory and no %s", v.target, abi.InfoName))
	}
	return found
}

// checkOther checks a file beside mountInfo.json: Kata takes each of their names for a
// sandbox's id, and asks the first one.
func (v kataVolume) checkOther(e fs.DirEntry) []Finding {
	file := filepath.Join(v.path, e.Name())
	info, err := e.Info()
	if err != nil {
		return nil // it was removed meanwhile
	}
	if !info.Mode().IsRegular() || info.Size() != 0 || !sandboxID.MatchString(e.Name()) || temporary.MatchString(e.Name()) {
		return []Finding{failure(fmt.Sprintf("rm -r %s, and let its writer keep its files elsewhere", quoted(file)),
			"volume %q: the foreign file %q is taken for a sandbox's id by Kata", v.target, e.Name())}
	}
	if v.sandboxLives(e.Name()) {
		return nil
	}
	return []Finding{warning("crustctl reconcile, or where it is no sandbox of yours: rm "+quoted(file),
		"volume %q: %q is taken for a sandbox's id, and no such sandbox runs", v.target, e.Name())}
}

func (v kataVolume) sandboxLives(id string) bool {
	kata, usual := v.node.Config.Handlers.Kata, config.Default().Handlers.Kata // it may be of an earlier configuration
	return slices.ContainsFunc([]string{kata.GoSandboxes, kata.RustSandboxes, usual.GoSandboxes, usual.RustSandboxes}, func(dir string) bool {
		_, err := os.Stat(v.node.at(filepath.Join(dir, id)))
		return err == nil
	})
}

// checkInfo checks a mountInfo.json for mistakes that one of Kata's two runtimes accepts and the other refuses.
func (v kataVolume) checkInfo() []Finding {
	path := filepath.Join(v.path, abi.InfoName)
	data, err := sys.ReadSmall(v.node.at(path), maxFile)
	if err != nil {
		if _, there := os.Lstat(v.node.at(path)); errors.Is(there, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		}
		return []Finding{failure("run crustctl doctor as root, or remove the volume", "volume %q: %s cannot be read: %v", v.target, abi.InfoName, err)}
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return []Finding{failure("publish the volume again; its writer must write the file elsewhere and rename it",
			"volume %q: %s is no JSON object, or cut off: %v", v.target, abi.InfoName, err)}
	}
	var found []Finding
	for _, trap := range traps(keys, v.target) {
		found = append(found, failure("correct the program that wrote it; volumes of crust-proxy itself: crustctl reconcile",
			"volume %q: %s %s", v.target, abi.InfoName, trap))
	}
	return found
}

func traps(keys map[string]json.RawMessage, target string) (found []string) {
	for _, key := range []string{"volume-type", "device", "fstype"} {
		found = append(found, stringTrap(keys, key, target)...)
	}
	var metadata map[string]string
	if raw, there := keys["metadata"]; there && json.Unmarshal(raw, &metadata) != nil {
		found = append(found, "has metadata that is no map of strings")
	}
	var options []string
	if raw, there := keys["options"]; there && json.Unmarshal(raw, &options) != nil {
		return append(found, "has options that are no list of strings")
	}
	if i := slices.IndexFunc(options, func(o string) bool { return o == "bind" || o == "rbind" }); i >= 0 {
		found = append(found, fmt.Sprintf("has %q among its options, which breaks Kata's Go runtime", options[i]))
	}
	return found
}

func stringTrap(keys map[string]json.RawMessage, key, target string) []string {
	raw, there := keys[key]
	if !there {
		return []string{fmt.Sprintf("lacks the key %q: Kata's Rust runtime refuses it", key)}
	}
	var value string
	if err := json.Unmarshal(raw, &value); err != nil {
		return []string{fmt.Sprintf("has a %q that is no string", key)}
	}
	switch {
	case key == "volume-type" && value == "blk" && sys.IsEmptyDir(target):
		return nil // both runtimes write and read it so
	case key == "volume-type" && !slices.Contains([]string{"directvol", "spdkvol", "vfiovol"}, value):
		return []string{fmt.Sprintf("has the volume-type %q: Kata's Rust runtime wants directvol", value)}
	case value == "":
		return []string{fmt.Sprintf("has an empty %q", key)}
	}
	return nil
}
