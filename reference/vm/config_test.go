package vm

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func read(t *testing.T, content string) (Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.json")
	check.Must(t, os.WriteFile(file, []byte(content), 0o600))
	return LoadConfig(func(string) string { return file })
}

// TestMistakesInTheConfiguration: each is refused by words that name its key.
func TestMistakesInTheConfiguration(t *testing.T) {
	for content, want := range map[string]string{
		`{"kernl":"/k","stateDir":"/s"}`: `"kernl": unknown key`,
		`{"kernl":"/k","cpus":"two"}`:    "cpus: text",
		`{"kernl":"/k","cpus":-1}`:       "cpus",
		`{"memoryMiB":"512"}`:            "memoryMiB: text cannot stand here; it takes a whole number",
		`{"memoryMiB":1.5}`:              "memoryMiB: 1.5 cannot stand here; it takes a whole number",
		`{"kernel":3}`:                   "kernel: a number cannot stand here; it takes text",
		`{"firstUser":-1}`:               "firstUser: -1 cannot stand here; it takes a whole number from 0 to 4294967295",
		`[]`:                             "it is not a JSON object",
		`{"cpus":2,}`:                    "it is not valid JSON: ",
		`{"memoryMiB":64}`:               "memoryMiB must be 128 or more",
		`{"firstUser":0}`:                "firstUser must be 1 to 4290772991",
		`{"firstUser":4290772992}`:       "firstUser must be 1 to 4290772991",
		`{"accel":"xen"}`:                `accel: "xen" is neither kvm nor tcg`,
		`{"kernel":"boot"}`:              `kernel: "boot" is not an absolute`,
		``:                               "({} leaves all keys at their defaults)",
		`{"cpus":2} {"cpus":4}`:          "it is not valid JSON: ",
		`{"bootTimeoutSeconds":-1}`:      "bootTimeoutSeconds",
	} {
		cfg, err := read(t, content)
		check.That(t, err != nil && strings.Contains(err.Error(), want), "%s: %+v, %v", content, cfg, err)
		tolerated := handler.Tolerate(err) == nil
		check.That(t, tolerated == strings.HasSuffix(want, "unknown key") && (!tolerated || cfg.StateDir == "/s"),
			"%s: whether containers can end with it: %v, of %+v", content, tolerated, cfg)
	}
	check.Value(read(t, `{"firstUser":4290772991}`))(t)
}

// TestKeysOfEarlierVersions are ignored, with a warning: a machine can be ended after an upgrade.
func TestKeysOfEarlierVersions(t *testing.T) {
	for content, warns := range map[string]bool{`{}`: false, `{"imageDir":"/d","maxImageMiB":4096}`: true, `{"maxImageMiB":1}`: true} {
		cfg, err := read(t, content)
		text := cfg.obsolete()
		check.That(t, err == nil && strings.Contains(text, "have no effect any more") == warns, "%s: %v, warning %q", content, err, text)
	}
}

func TestWhatIsNotInstalledIsNamed(t *testing.T) {
	cfg := check.Value(read(t, `{"kernel":"/","qemu":"/does/not/exist","virtiofsd":"/nor/this"}`))(t)
	cfg.AgentProgram = cfg.Program
	check.Fails(t, cfg.check(), `set "qemu" in `+cfg.file, `/nor/this: `)
	cfg.QEMU, cfg.Virtiofsd = "/", "/"
	check.Must(t, cfg.check())
}

func TestWhatANewcomerTypes(t *testing.T) {
	for words, want := range map[string]struct {
		code           int
		stdout, stderr string
	}{
		"--help":    {0, "crust-vm crust stats", ""},
		"help":      {0, "crust-vm crust stats", ""},
		"--version": {0, "crust-vm version", ""},
		"":          {1, "", "a command is missing; see `crust-vm --help`"},
		"attach":    {1, "", "attach: its arguments are"},
		"frob":      {1, "", `the command "frob" is not supported by crust-vm`},
	} {
		var out, told bytes.Buffer
		code := Main(append([]string{"crust-vm"}, strings.Fields(words)...), &out, &told)
		check.That(t, code == want.code && strings.Contains(out.String(), want.stdout) && strings.Contains(told.String(), want.stderr),
			"%q: %d, %q, %q", words, code, out.String(), told.String())
	}
}

// TestKeyOfANewerVersion: no container is made with it, and those that there are can end.
func TestKeyOfANewerVersion(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.json")
	check.Must(t, os.WriteFile(file, fmt.Appendf(nil, `{"new":1,"stateDir":%q}`, t.TempDir()), 0o600))
	t.Setenv(configVariable, file)
	for words, refused := range map[string]bool{"create --bundle /b a": true, "state a": false, "kill a": false, "delete --force a": false} {
		var out, told bytes.Buffer
		code := Main(append([]string{"crust-vm"}, strings.Fields(words)...), &out, &told)
		check.That(t, strings.Contains(told.String(), `"new": unknown key`) == refused && (code == 0) == strings.HasPrefix(words, "delete"),
			"%s: exit status %d, %s", words, code, told.String())
	}
}
