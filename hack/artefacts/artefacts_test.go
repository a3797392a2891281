package main

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// release makes a directory as hack/release.sh does, signed, and returns it with the public key.
func release(t *testing.T) (dir, public string) {
	t.Helper()
	dir, key := t.TempDir(), filepath.Join(t.TempDir(), "key")
	write(t, filepath.Join(dir, "package.deb"), "a package")
	sum := sha256.Sum256([]byte("a package"))
	write(t, filepath.Join(dir, sumsFile), hex.EncodeToString(sum[:])+"  package.deb\n")
	check.Must(t, makeKey(key))
	stdout := os.Stdout
	out := check.Value(os.Create(filepath.Join(dir, "crust-proxy-1.2.3.intoto.json")))(t)
	os.Stdout = out
	err := provenance("v1.2.3", "c0ffee", filepath.Join(dir, sumsFile))
	os.Stdout = stdout
	check.Must(t, err)
	check.Must(t, out.Close())
	check.Must(t, sign(key, []string{filepath.Join(dir, sumsFile), out.Name()}))
	return dir, key + ".pub"
}

// TestVerify: whatever somebody changes after the signature is found.
func TestVerify(t *testing.T) {
	for name, change := range map[string]func(dir string){
		"":                    func(string) {},
		"is not what":         func(dir string) { write(t, dir+"/package.deb", "another") },
		"and there are 0":     func(dir string) { check.Must(t, os.Remove(dir+"/package.deb")) },
		"says: \"\"":          func(dir string) { write(t, dir+"/more.deb", "") },
		"of this file and":    func(dir string) { replace(t, dir+"/crust-proxy-1.2.3.intoto.json", "c0ffee", "c0ffef") },
		"signature is not of": func(dir string) { write(t, dir+"/SHA256SUMS.sigstore.json", "{}") },
		"no such file":        func(dir string) { check.Must(t, os.Remove(dir+"/SHA256SUMS.sigstore.json")) },
		"0 provenances":       func(dir string) { check.Must(t, os.Remove(dir+"/crust-proxy-1.2.3.intoto.json")) },
	} {
		dir, public := release(t)
		change(dir)
		err := verify(public, dir)
		check.That(t, (err == nil) == (name == "") && (err == nil || strings.Contains(err.Error(), name)), "want %q, got %v", name, err)
	}
	dir, _ := release(t)
	_, other := release(t)
	check.That(t, verify(other, dir) != nil, "another key verifies")
}

// TestPreAuth is the example of DSSE's specification.
func TestPreAuth(t *testing.T) {
	e := envelope{Payload: []byte("hello world"), PayloadType: "http://example.com/HelloWorld"}
	check.Equal(t, string(e.preAuth()), "DSSEv1 29 http://example.com/HelloWorld 11 hello world", "the encoding")
}

func write(t *testing.T, path, text string) {
	t.Helper()
	check.Must(t, os.WriteFile(path, []byte(text), 0o600))
}

func replace(t *testing.T, path, old, text string) {
	t.Helper()
	write(t, path, strings.ReplaceAll(string(check.Value(os.ReadFile(path))(t)), old, text))
}
