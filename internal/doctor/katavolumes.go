package doctor

import (
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

var (
	// sandboxID is what containerd takes for an id.
	sandboxID = regexp.MustCompile(`^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$`)
	// criID is what the CRI gives to every sandbox.
	criID = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

func checkKataVolumes(_ context.Context, n Node, _ Daemon) []Finding {
	entries, err := kataEntries(n)
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "the volumes in %s cannot be listed: %v", n.KataDir, err)}
	}
	var found []Finding
	for _, e := range entries {
		found = append(found, checkKataVolume(n, e)...)
	}
	return orOK(found, "%d volumes in %s are well formed", len(entries), n.KataDir)
}

type kataVolume struct {
	node         Node
	path, target string
}

func checkKataVolume(n Node, e fs.DirEntry) []Finding {
	path := filepath.Join(n.KataDir, e.Name())
	if !e.IsDir() {
		return []Finding{failure("find out who made it, and remove it", "%q is not a volume's directory", path)}
	}
	target, err := volumePath(e.Name())
	if err != nil {
		return []Finding{failure("its writer must name it by the URL-safe base64, with padding, of the volume's path; remove it when no pod uses it",
			"the name of %q is no volume's: Kata never finds it (%v)", path, err)}
	}
	entries, err := os.ReadDir(n.at(path))
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "%q cannot be read: %v", path, err)}
	}
	v := kataVolume{n, path, target}
	return append(v.checkMode(e), v.checkFiles(entries)...)
}

// katasEmptyDir tells whether a volume is an emptyDir that Kata itself keeps on a
// block device (its emptydir_mode).
func katasEmptyDir(target string) bool {
	return filepath.Base(filepath.Dir(target)) == "kubernetes.io~empty-dir"
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
		return nil // one that went away meanwhile has no mode
	}
	if katasEmptyDir(v.target) && info.Mode().Perm()&0o022 == 0 {
		return nil // runtime-rs makes them so, and nobody else comes past the directory above
	}
	return []Finding{warning("chmod 0700 "+quoted(v.path), "the directory of volume %q has mode %04o: others may read or change it", v.target, info.Mode().Perm())}
}

func (v kataVolume) checkFiles(entries []fs.DirEntry) []Finding {
	var found []Finding
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

// checkOther checks a file beside mountInfo.json: Kata takes every one of them
// for a sandbox's id, and asks the first.
func (v kataVolume) checkOther(e fs.DirEntry) []Finding {
	file := filepath.Join(v.path, e.Name())
	info, err := e.Info()
	if err != nil {
		return nil // it went away meanwhile
	}
	if !info.Mode().IsRegular() || info.Size() != 0 || !sandboxID.MatchString(e.Name()) || looksTemporary(e.Name()) {
		return []Finding{failure(fmt.Sprintf("rm -r %s, and let its writer keep its files elsewhere", quoted(file)),
			"volume %q: the foreign file %q is taken for a sandbox's id by Kata", v.target, e.Name())}
	}
	if v.sandboxLives(e.Name()) {
		return nil
	}
	if criID.MatchString(e.Name()) {
		return []Finding{warning("crustctl reconcile", "volume %q: sandbox %s is gone; Kata's own tools ask it for ever", v.target, show.ShortID(e.Name()))}
	}
	return []Finding{warning("where it is no sandbox of yours: rm "+quoted(file),
		"volume %q: %q is taken for a sandbox's id, and no such sandbox runs", v.target, e.Name())}
}

func looksTemporary(name string) bool {
	lower := strings.ToLower(name)
	for _, part := range []string{"tmp", "temp", "lock", ".swp", ".bak", ".new", ".old", ".json"} {
		if strings.Contains(lower, part) {
			return true
		}
	}
	return false
}

// sandboxLives looks where the Go and the Rust runtime keep a running sandbox.
func (v kataVolume) sandboxLives(id string) bool {
	for _, dir := range v.node.SandboxDirs {
		if _, err := os.Stat(v.node.at(filepath.Join(dir, id))); err == nil {
			return true
		}
	}
	return false
}
