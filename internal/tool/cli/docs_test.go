package cli

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/crust-proxy/crust-proxy/internal/tool/backupcli"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// The page must name every command, flag, exit code and check that there is.
func TestDocsAreInStepWithHelp(t *testing.T) {
	for _, root := range roots() {
		page := string(check.Value(os.ReadFile("../../../docs/" + root.Name() + ".md"))(t))
		for _, cmd := range root.Commands() {
			if cmd.Hidden || cmd.Name() == "help" || cmd.Name() == "completion" {
				continue
			}
			section := sectionOf(page, root.Name(), cmd.Name())
			check.Require(t, section != "", "no section on %s", cmd.CommandPath())
			checkSection(t, cmd, section)
		}
		root.PersistentFlags().VisitAll(func(f *pflag.Flag) { wants(t, page, "--"+f.Name) })
		if root.Name() != "crustctl" {
			continue
		}
		for _, row := range []string{"| 0 | done", "| 1 | failed", "| 2 | wrong usage", "| 3 | `doctor`"} {
			wants(t, page, row)
		}
	}
}

// roots are the programs whose commands are built as crustctl's are.
func roots() []*cobra.Command {
	getenv := func(string) string { return "" }
	return []*cobra.Command{newRoot(Env{Getenv: getenv, Node: doctor.DefaultNode()}), backupcli.NewRoot(backupcli.Env{Getenv: getenv})}
}

// TestHelpFitsATerminal: what a command says of itself is not wrapped by anybody.
func TestHelpFitsATerminal(t *testing.T) {
	for _, cmd := range slices.Concat(roots()[0].Commands(), roots()[1].Commands(), roots()) {
		for line := range strings.Lines(cmd.Short + "\n" + cmd.Long + "\n" + cmd.Example) {
			check.That(t, len(line) <= 91, "%s --help has a line of %d bytes: %s", cmd.Name(), len(line), line)
		}
	}
}

// sectionOf returns what the page has on a command: its section, or its row in the table of short ones.
func sectionOf(page, program, command string) string {
	if _, row, found := strings.Cut(page, "\n| `"+program+" "+command); found {
		row, _, _ = strings.Cut(row, "\n")
		return program + " " + command + row
	}
	_, section, found := strings.Cut(page, "# "+command+"\n")
	if !found {
		return ""
	}
	section, _, _ = strings.Cut(section, "\n#")
	return section
}

func checkSection(t *testing.T, cmd *cobra.Command, section string) {
	t.Helper()
	wants(t, section, cmd.CommandPath())
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			wants(t, section, "`--"+f.Name)
		}
	})
	for _, alias := range cmd.Aliases {
		wants(t, section, "`"+alias+"`")
	}
}

func wants(t *testing.T, text, part string) {
	t.Helper()
	check.That(t, strings.Contains(text, part), "the page does not say %q where it should", part)
}
