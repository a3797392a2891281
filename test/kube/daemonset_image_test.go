//go:build system

package kube_test

import (
	"archive/tar"
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const proxyImage = "localhost/crust-proxy:test"

// proxyLayer is what hack/image.sh makes, of this machine's files: our
// programs, what looks at devices and formats them, and a shell.
func proxyLayer(t *testing.T) []byte {
	t.Helper()
	files := map[string]string{} // where they go, and where they are
	for _, name := range []string{"crust-proxy", "crustctl", "crust-runc", "crust-runc-agent"} {
		files["usr/bin/"+name] = rig.Program(t, name)
	}
	for _, name := range []string{"blkid", "mkfs.ext4", "mkfs.xfs", "sh", "cp", "mv", "chmod"} {
		files["bin/"+name] = lookUp(t, name)
	}
	for _, program := range slices.Collect(maps.Values(files)) {
		for _, library := range libraries(t, program) {
			files[strings.TrimPrefix(library, "/")] = library
		}
	}
	return packed(t, files)
}

func lookUp(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	check.Must(t, err)
	return path
}

var libraryPath = regexp.MustCompile(`(/\S+) \(0x`)

// libraries are those that a program is linked with.
func libraries(t *testing.T, program string) []string {
	t.Helper()
	out, err := exec.Command("ldd", program).CombinedOutput()
	check.Require(t, err == nil || bytes.Contains(out, []byte("not a dynamic executable")), "ldd %s: %v: %s", program, err, out)
	var all []string
	for _, match := range libraryPath.FindAllSubmatch(out, -1) {
		all = append(all, string(match[1]))
	}
	return all
}

func packed(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	// As in hack/image.sh: a directory, and no link to /run, which is the node's.
	check.Must(t, w.WriteHeader(&tar.Header{Name: "var/run/secrets/", Typeflag: tar.TypeDir, Mode: 0o755}))
	for _, name := range slices.Sorted(maps.Keys(files)) {
		raw, err := os.ReadFile(files[name])
		check.Must(t, err)
		check.Must(t, w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(raw))}))
		_, err = w.Write(raw)
		check.Must(t, err)
	}
	check.Must(t, w.Close())
	return out.Bytes()
}
