package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func write(t *testing.T, files map[string]string) *module {
	t.Helper()
	t.Chdir(t.TempDir())
	for name, text := range files {
		check.Must(t, os.MkdirAll(filepath.Dir(name), 0o750))
		check.Must(t, os.WriteFile(name, []byte(text), 0o600))
	}
	return check.Value(readModule("."))(t)
}

func wantOne(t *testing.T, found []string, words ...string) {
	t.Helper()
	check.Require(t, len(found) == 1, "found %q, want one", found)
	check.Says(t, "the finding", found[0], words...)
}

func TestWideTypes(t *testing.T) {
	m := write(t, map[string]string{
		"a/a.go": "package a\ntype T struct{}\nfunc (t *T) A() {}\n", "a/b.go": "package a\nfunc (T) B() {}\n",
		"a/c.go": "package a\nfunc (t *T) C() {}\n", "a/d.go": "package a\nfunc (t *T) D() {}\n",
		"a/a_test.go": "package a\nfunc (t *T) E() {}\n",
	})
	b := &limits{ceilings: map[string]int{"product": 9}}
	wantOne(t, b.check(m), "a.T", "4 methods in 4 files")
	b.types = map[string][2]int{"a.T": {4, 4}}
	check.Empty(t, b.check(m), "found")
	b.types["a.Gone"] = [2]int{30, 4}
	wantOne(t, b.check(m), "a.Gone", "is gone")
	b.types = map[string][2]int{"a.T": {4, 4}}
	b.ceilings["product"] = 8
	wantOne(t, b.check(m), "product: 9 lines", "ceiling is 8")
}

func TestEmbeddedPointers(t *testing.T) {
	m := write(t, map[string]string{
		"a/a.go": "package a\ntype T struct{}\nfunc (t *T) A() {}\ntype plain struct{}\ntype U struct {\n\t*plain\n\t*T\n}\n",
		"b/b.go": "package b\nimport \"sync\"\ntype V struct { *sync.Mutex }\n",
	})
	wantOne(t, m.embedded(), "a/a.go:7", "U embeds *a.T")
}

func TestSharedEmbedding(t *testing.T) {
	m := write(t, map[string]string{
		"a/a.go": "package a\ntype parts struct{ n int }\ntype once struct{ n int }\ntype U struct {\n\tparts\n\tonce\n}\ntype V struct{ parts }\ntype W struct{ parts }\n",
	})
	wantOne(t, m.embedded(), "a.parts is embedded in U, V, W")
}

func TestWhatTheCoreMayNotKnow(t *testing.T) {
	m := write(t, map[string]string{
		"pkg/deferral/claim/a.go": "package claim\n\n// A waits for the Pod.\nfunc A() {}\n",
		"pkg/volume/v.go":         "package volume\nimport \"fmt\"\nvar _ = fmt.Sprint\ntype V struct{ A int `json:\"csi\"` }\n",
	})
	wantOne(t, m.words(), "pkg/deferral/claim/a.go:3", `"Pod"`)
	m = write(t, map[string]string{"pkg/volume/mountopt/t.go": "package mountopt\nconst textDelete = \"delete its pod\"\n"})
	wantOne(t, m.words(), "pkg/volume/mountopt/t.go:2", `"pod"`)
	m = write(t, map[string]string{"pkg/volume/v.go": "package volume\nimport \"golang.org/x/sys/unix\"\nvar _ = unix.Close\n"})
	wantOne(t, m.words(), "golang.org/x/sys/unix")
}

func TestMessages(t *testing.T) {
	for subject, want := range map[string]string{
		"top: define colours once": "", "pkg/deferral, docs: say who may ask": "", "Have the colours in one place": "area: what",
		"top: " + strings.Repeat("x", mostSubject): "72",
	} {
		found := checkMessage("abc", subject, "why")
		check.That(t, (want != "" || len(found) == 0) && (want == "" || len(found) == 1 && strings.Contains(found[0], want)),
			"%q: %q", subject, found)
	}
	wantOne(t, checkMessage("abc", "top: define colours once", " \n"), "say why")
}
