package vm

import (
	"bytes"
	"strings"
	"testing"
)

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
		if code != want.code || !strings.Contains(out.String(), want.stdout) || !strings.Contains(told.String(), want.stderr) {
			t.Errorf("%q: %d, %q, %q", words, code, out.String(), told.String())
		}
	}
}
