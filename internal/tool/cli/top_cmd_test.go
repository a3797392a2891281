package cli

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestTopPrintsOnePictureWhereThereIsNoTerminal(t *testing.T) {
	for _, args := range [][]string{{"top"}, {"top", "--once"}, {"top", "-o", "wide"}} {
		b := newBench(t).serve()
		b.env["LANG"] = "C.UTF-8"
		r := b.run(args...)
		check.Require(t, r.code == command.ExitOK && r.err == "", "%v: %+v", args, r)
		for _, part := range []string{"crust-proxy " + sys.Version(), "Volumes 3  1 degraded  1 published  1 bound", "Handlers 1/2", "Drivers 1/2",
			"! handler crust: no runtime-cli is allowed", "━", " 13%", "1.2ms", `sandbox said: \x1b[31mred\nEVENT fake row`} {
			check.That(t, strings.Contains(r.out, part), "%v: no %q in\n%s", args, part, r.out)
		}
		check.That(t, !strings.ContainsAny(r.out, "\x1b\u202e"), "a terminal would obey\n%q", r.out)
		wide := slices.Contains(args, "wide")
		check.That(t, strings.Contains(r.out, "ebs.csi.aws.com") == wide && (widest(r.out) > 80) == wide,
			"%v: it has %d columns\n%s", args, widest(r.out), r.out)
	}
}

// widest is the number of characters in the longest line.
func widest(text string) (most int) {
	for line := range strings.Lines(text) {
		most = max(most, len([]rune(strings.TrimSuffix(line, "\n"))))
	}
	return most
}

func TestTopKeepsToASCIIWhereTheLocaleDoes(t *testing.T) {
	for value, unicode := range map[string]bool{"": false, "C": false, "en_US.UTF-8": true, "de_DE.utf8": true, "C.UTF-8": true, "ru_RU.KOI8-R": false} {
		b := newBench(t).serve()
		b.env["LANG"] = value
		r := b.run("top", "--once")
		check.That(t, strings.Contains(r.out, "━") == unicode && strings.Contains(r.out, "##") != unicode, "LANG=%s:\n%s", value, r.out)
	}
	b := newBench(t).serve()
	b.env["LANG"], b.env["LC_ALL"] = "C.UTF-8", "POSIX"
	r := b.run("top", "--once")
	check.That(t, !strings.Contains(r.out, "━"), "LC_ALL is not heeded:\n%s", r.out)
}

func TestTopAsJSON(t *testing.T) {
	b := newBench(t).serve()
	b.admin.config = "a: secret that nobody asked for"
	r := b.run("top", "-o", "json", "--sort", "name", "--state", "bound", "--filter", "KATA")
	var got struct {
		Node         struct{ Version string }
		FrontEnabled bool
		Handlers     []struct{ Name string }
		Drivers      []struct{ Name string }
		Volumes      []struct{ ID, State, StatsTook string }
	}
	err := json.Unmarshal([]byte(r.out), &got)
	check.Require(t, err == nil, "%v in %+v", err, r)
	check.That(t, got.Node.Version == sys.Version() && got.FrontEnabled && len(got.Handlers) == 2 && len(got.Drivers) == 2 &&
		len(got.Volumes) == 1 && got.Volumes[0].ID == idA && got.Volumes[0].StatsTook == "0.001234567s", "%+v", got)
	check.That(t, !strings.Contains(r.out, "secret"), "the configuration is in the picture")
	r = b.run("top", "-o", "yaml", "--state", "bound")
	check.That(t, strings.Contains(r.out, "\nvolumes:\n"), "%+v", r)
}

func TestTopRefusesWhatCannotBeMeant(t *testing.T) {
	for _, args := range [][]string{{"--sort", "size"}, {"--state", "odd"}, {"--interval", "10ms"}, {"extra"}} {
		r := newBench(t).run(append([]string{"top"}, args...)...)
		check.That(t, r.code == command.ExitUsage && strings.Contains(r.err, "crustctl top --help"), "%v: %+v", args, r)
	}
}

func TestTopOfNoDaemonSaysWhatToDo(t *testing.T) {
	b := newBench(t)
	for _, tty := range []bool{false, true} {
		keys := (*os.File)(nil)
		if tty {
			master, slave, err := pty.Open()
			check.Must(t, err)
			defer func() { _, _ = master.Close(), slave.Close() }()
			keys = slave
		}
		b.tty, b.keys, b.env["TERM"] = tty, keys, "xterm"
		r := b.run("top")
		check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, "crust-proxy is not running") && r.out == "",
			"on a terminal %v: %+v", tty, r)
	}
}
