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
)

const mountInfoName = "mountInfo.json"

var (
	// sandboxID is what containerd takes for an id.
	sandboxID = regexp.MustCompile(`^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$`)
	// criID is what the CRI gives to every sandbox.
	criID = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

func checkKataVolumes(_ context.Context, n Node, _ Daemon) []Finding {
	entries, err := n.kataEntries()
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "the volumes in %s cannot be listed: %v", n.KataDir, err)}
	}
	var found []Finding
	for _, e := range entries {
		found = append(found, n.kataVolume(e)...)
	}
	return orOK(found, "%d volumes in %s are well formed", len(entries), n.KataDir)
}

func (n Node) kataVolume(e fs.DirEntry) []Finding {
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
	return append(n.volumeMode(path, target, e), n.volumeFiles(path, target, entries)...)
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

func (n Node) volumeMode(path, target string, e fs.DirEntry) []Finding {
	info, err := e.Info()
	if err != nil || info.Mode().Perm()&0o077 == 0 {
		return nil // one that went away meanwhile has no mode
	}
	return []Finding{warning("chmod 0700 "+quoted(path), "the directory of volume %q has mode %04o: others may read or change it", target, info.Mode().Perm())}
}

func (n Node) volumeFiles(path, target string, entries []fs.DirEntry) []Finding {
	var found []Finding
	hasInfo := false
	for _, e := range entries {
		if e.Name() == mountInfoName {
			hasInfo = true
			found = append(found, n.mountInfo(filepath.Join(path, mountInfoName), target)...)
			continue
		}
		found = append(found, n.otherFile(path, target, e)...)
	}
	if !hasInfo {
		found = append(found, warning("where no pod uses it: rm -r "+quoted(path), "volume %q has a directory and no %s", target, mountInfoName))
	}
	return found
}

// otherFile judges a file beside mountInfo.json: Kata takes every one of them
// for a sandbox's id, and asks the first.
func (n Node) otherFile(path, target string, e fs.DirEntry) []Finding {
	file := filepath.Join(path, e.Name())
	info, err := e.Info()
	if err != nil {
		return nil // it went away meanwhile
	}
	if !info.Mode().IsRegular() || info.Size() != 0 || !sandboxID.MatchString(e.Name()) || looksTemporary(e.Name()) {
		return []Finding{failure(fmt.Sprintf("rm -r %s, and let its writer keep its files elsewhere", quoted(file)),
			"volume %q: the foreign file %q is taken for a sandbox's id by Kata", target, e.Name())}
	}
	if n.sandboxLives(e.Name()) {
		return nil
	}
	if criID.MatchString(e.Name()) {
		return []Finding{warning("crustctl reconcile", "volume %q: sandbox %s is gone; Kata's own tools ask it for ever", target, short(e.Name()))}
	}
	return []Finding{warning("where it is no sandbox of yours: rm "+quoted(file),
		"volume %q: %q is taken for a sandbox's id, and no such sandbox runs", target, e.Name())}
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
func (n Node) sandboxLives(id string) bool {
	for _, dir := range n.SandboxDirs {
		if _, err := os.Stat(n.at(filepath.Join(dir, id))); err == nil {
			return true
		}
	}
	return false
}
