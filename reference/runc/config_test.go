package runc

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func read(t *testing.T, content string) (Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.json")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return LoadConfig(func(name string) string {
		if name != configVariable {
			t.Errorf("asked for %s", name)
		}
		return file
	})
}

func TestConfig(t *testing.T) {
	cfg, err := read(t, `{"root":"/r","agent":false}`)
	self, _ := os.Executable()
	if err != nil || cfg.Root != "/r" || cfg.Agent || cfg.StateDir != "/run/crust-runc" || cfg.Program != self {
		t.Fatalf("%+v, %v", cfg, err)
	}
	for _, bad := range []string{`{"rot":"/r"}`, `{"root":"r"}`, `{"root":"/r/"}`, `{"stateDir":"/a/../b"}`, `{`, ``, `{} {}`} {
		if cfg, err := read(t, bad); err == nil {
			t.Errorf("%s: taken as %+v", bad, cfg)
		}
	}
	if _, err := LoadConfig(func(string) string { return "/does/not/exist" }); err == nil {
		t.Error("a configuration that was asked for and is not there was passed over")
	}
}

func TestRuntimeIsNotItself(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "runc")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	if path, err := (Config{Runtime: link}).runtime(); err == nil || !strings.Contains(err.Error(), "itself") {
		t.Fatalf("%q, %v", path, err)
	}
	t.Setenv("PATH", t.TempDir())
	if path, err := (Config{}).runtime(); err == nil || !strings.Contains(err.Error(), "install") {
		t.Fatalf("%q, %v", path, err)
	}
}
