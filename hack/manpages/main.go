// Manpages writes the man pages of the package's programs, from what the programs themselves print as their help.
//
//	manpages VERSION DATE PROGRAMS-DIR MAN-DIR
package main

import (
	"cmp"
	"compress/gzip"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// page is a program: its section, its line for whatis, and the arguments of its helps.
type page struct {
	program, section, summary string
	helps                     [][]string
}

var pages = []page{
	{"crust-proxy", "8", "node-local daemon that lets a sandbox mount its CSI volumes", [][]string{{"--help"}}},
	{"crustctl", "8", "look at deferred volumes and check a node", [][]string{{"--help"}}},
	{"kubectl-crust", "8", "look at crust-proxy on the nodes of a cluster", [][]string{{"--help"}}},
	{"crust-backup", "1", "back up volumes by the changed blocks of their snapshots", [][]string{{"--help"}}},
	{"crust-runc", "8", "runc that mounts deferred volumes in the sandbox of their pod", [][]string{{"crust", "help"}}},
	{"crust-runc-agent", "8", "answer for the sandboxes of crust-runc on a socket", [][]string{{"--help"}}},
	{"crust-vm", "8", "OCI runtime whose pods are virtual machines that mount deferred volumes", [][]string{{"crust", "help"}}},
	{"crust-vm-agent", "8", "first program of a virtual machine of crust-vm", [][]string{{"--help"}}},
	{"crust-conformance", "1", "test a runtime handler, or a CSI driver", [][]string{{"--help"}, {"driver", "--help"}, {"snapshot-metadata", "--help"}}},
}

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: manpages VERSION DATE PROGRAMS-DIR MAN-DIR")
		os.Exit(2)
	}
	err := writeReference(os.Args[1], os.Args[2], os.Args[4])
	for _, p := range pages {
		err = cmp.Or(err, p.write(os.Args[1], os.Args[2], os.Args[3], os.Args[4]))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// writeReference writes the page of the configuration file: its commented reference as it stands.
func writeReference(version, date, dir string) error {
	raw, err := os.ReadFile("systemd/config.yaml")
	if err != nil {
		return err
	}
	p := page{program: "crust-proxy.yaml", section: "5", summary: "configuration file of crust-proxy"}
	text := p.head(version, date) + ".SH DESCRIPTION\n.nf\n"
	for line := range strings.Lines(string(raw)) {
		text += roff(line)
	}
	return p.save(dir, text+".fi\n")
}

func (p page) write(version, date, programs, dir string) error {
	text := p.head(version, date)
	for i, args := range p.helps {
		help, err := helpOf(programs, p.program, args)
		if err != nil {
			return err
		}
		if i > 0 {
			text += ".SH " + strings.ToUpper(roff(args[0])) + "\n" + body(help, false)
			continue
		}
		text += ".SH DESCRIPTION\n" + body(help, true)
		for _, command := range commandsIn(help) {
			help, err := helpOf(programs, p.program, []string{"help", command})
			if err != nil {
				return err
			}
			text += ".SH " + strings.ToUpper(roff(p.program+" "+command)) + "\n" + body(help, false)
		}
	}
	return p.save(dir, text+".SH SEE ALSO\n/usr/share/doc/crust\\-proxy/docs (package crust-proxy)\n")
}

func (p page) head(version, date string) string {
	return fmt.Sprintf(".TH %s %s %s %q %q\n.SH NAME\n%s \\- %s\n", strings.ToUpper(p.program), p.section, date,
		version, "crust-proxy", roff(p.program), roff(p.summary))
}

func (p page) save(dir, text string) error {
	dir = filepath.Join(dir, "man"+p.section)
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // everybody may read man pages
		return err
	}
	return compress(filepath.Join(dir, p.program+"."+p.section+".gz"), text)
}

func helpOf(programs, program string, args []string) (string, error) {
	cmd := exec.Command(filepath.Join(programs, program), args...) //nolint:gosec // built a moment ago
	// Nothing of the builder's: some defaults come from variables, as that of crustctl --socket.
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	out, err := cmd.CombinedOutput() // some print it as an error's help
	if err != nil || len(out) == 0 {
		return "", fmt.Errorf("%s %s: %w: %q", program, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// commandsIn lists the commands of a program that has a help for each.
func commandsIn(help string) (names []string) {
	_, list, _ := strings.Cut(help, "\nAvailable Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	for line := range strings.Lines(list) {
		if name := strings.Fields(line)[0]; name != "help" {
			names = append(names, name)
		}
	}
	return names
}

var (
	heading = regexp.MustCompile(`^([A-Z][A-Za-z ]*):$`)
	flag    = regexp.MustCompile(`^ +(-.*?)  +(\S.*)$`)

	// Paragraphs that a heading ends, or has begun already.
	beforeHeading = regexp.MustCompile(`(\.PP\n)+(\.S[HS]|$)`)
	afterHeading  = regexp.MustCompile(`(\.S[HS] .*\n)(\.PP\n)+`)
)

// body sets a help: its headings, which become sections where they are the page's own,
// its flags, and other indented lines as they stand.
func body(help string, sections bool) string {
	var out strings.Builder
	verbatim := false
	end := func() {
		if verbatim {
			out.WriteString(".fi\n.RE\n")
		}
		verbatim = false
	}
	for line := range strings.SplitSeq(strings.TrimRight(help, "\n"), "\n") {
		title, option := heading.FindStringSubmatch(line), flag.FindStringSubmatch(line)
		if title != nil || option != nil || !strings.HasPrefix(line, " ") {
			end()
		}
		switch {
		case title != nil && sections:
			out.WriteString(".SH " + strings.ToUpper(roff(title[1])) + "\n")
		case title != nil:
			out.WriteString(".SS " + roff(title[1]) + "\n")
		case option != nil:
			out.WriteString(".TP\n.B " + roff(option[1]) + "\n" + roff(option[2]) + "\n")
		case line == "":
			out.WriteString(".PP\n")
		case strings.HasPrefix(line, " "):
			if !verbatim {
				out.WriteString(".RS 2\n.nf\n")
			}
			verbatim = true
			out.WriteString(roff(strings.TrimPrefix(line, "  ")) + "\n")
		default:
			out.WriteString(roff(line) + "\n")
		}
	}
	end()
	return beforeHeading.ReplaceAllString(afterHeading.ReplaceAllString(out.String(), "$1"), "$2")
}

func roff(line string) string {
	line = strings.NewReplacer(`\`, `\e`, "-", `\-`, "`", `\(ga`, "'", `\(aq`).Replace(line)
	if strings.HasPrefix(line, ".") {
		line = `\&` + line
	}
	return line
}

// compress writes a page as Debian wants it: as small as can be, and without a time.
func compress(path, text string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644) //nolint:gosec // everybody may read a man page
	if err != nil {
		return err
	}
	packed, err := gzip.NewWriterLevel(file, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := packed.Write([]byte(text)); err != nil {
		return err
	}
	if err := packed.Close(); err != nil {
		return err
	}
	return file.Close()
}
