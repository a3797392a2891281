//go:build system

package package_test

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// step is one command of a page, or a file that it has somebody write.
type step struct {
	section string
	text    string // the command, or what the file has
	output  string // what the page says that the command prints, if it says so
	file    string
}

// stepsOf takes the steps out of a page's blocks: in one of console, lines with a prompt are commands, and what
// follows is output; one whose first line is a comment with a path is a file.
func stepsOf(page string) (steps []step, err error) {
	section := ""
	for number, part := range strings.Split("\n"+page, "\n```") {
		if number%2 == 0 { // between blocks
			if at := strings.LastIndex(part, "\n## "); at >= 0 {
				section, _, _ = strings.Cut(part[at+len("\n## "):], "\n")
			}
			continue
		}
		language, text, _ := strings.Cut(part+"\n", "\n")
		path, isFile := strings.CutPrefix(text, "# /")
		switch {
		case language == "console":
			for _, command := range strings.Split("\n"+text, "\n$ ")[1:] {
				command, output, _ := strings.Cut(strings.TrimSuffix(command, "\n")+"\n", "\n")
				steps = append(steps, step{section: section, text: command, output: output})
			}
		case isFile:
			path, _, _ = strings.Cut(path, "\n")
			steps = append(steps, step{section: section, text: text, file: "/" + path})
		case slices.Contains([]string{"sh", "bash", "shell"}, language):
			return nil, fmt.Errorf("a block of %q in %q: print commands as console, with prompts", language, section)
		}
	}
	return steps, nil
}

// shell is bash in a machine, to which one types.
type shell struct {
	*machine
	in, said *os.File
	out      *bufio.Reader
	starting bool // the last command started a program in the background
}

// shell begins a session of root. At its end, which is also the end of the test's process, however it comes,
// nothing is left of the machine: the loop devices that somebody makes with losetup would stay.
func (m *machine) shell() *shell {
	m.t.Helper()
	stdin, in, err := os.Pipe()
	check.Must(m.t, err)
	said, stdout, err := os.Pipe()
	check.Must(m.t, err)
	cmd := m.command("bash")
	cmd.Env = []string{"HOME=/root", "USER=root", "LANG=C.UTF-8", "TERM=dumb", "DEBIAN_FRONTEND=noninteractive",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/go/bin"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stdout
	check.Must(m.t, cmd.Start())
	check.Must(m.t, stdin.Close())
	check.Must(m.t, stdout.Close())
	s := &shell{machine: m, in: in, said: said, out: bufio.NewReader(said)}
	m.t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait() // the machine goes off under it
		_ = said.Close()
	})
	s.typed("trap 'losetup --associated /var/lib/demo-disk.img --noheadings --output NAME | xargs --no-run-if-empty losetup --detach; " +
		"systemctl poweroff --force --force' EXIT; cd")
	return s
}

// typed types a command, and returns what was printed and the exit status.
func (s *shell) typed(command string) (said, status string) {
	s.t.Helper()
	const end = "\x04end "
	_, err := fmt.Fprintf(s.in, "{ %s\n} </dev/null\nprintf '%s%%s\\n' $?\n", command, end)
	check.Must(s.t, err)
	check.Must(s.t, s.said.SetReadDeadline(time.Now().Add(10*time.Minute)))
	for {
		line, err := s.out.ReadString('\n')
		if err != nil {
			s.t.Fatalf("%s: %v; until then it printed:\n%s%s", command, err, said, line)
		}
		if before, status, ended := strings.Cut(line, end); ended {
			return said + before, strings.TrimSpace(status)
		}
		said += line
	}
}

// do does one step, and reports whether it came out as the page says. Where the page shows what is printed,
// that counts, since a command may have to fail.
func (s *shell) do(step step) bool {
	s.t.Helper()
	if step.file != "" {
		check.Must(s.t, os.MkdirAll(s.path(filepath.Dir(step.file)), 0o755))
		check.Must(s.t, os.WriteFile(s.path(step.file), []byte(step.text), 0o644))
		return true
	}
	begun := time.Now()
	said, status := s.typed(step.text)
	for status != "0" && s.starting && time.Since(begun) < 20*time.Second { // who types is slower than a program that starts
		said, status = s.typed(step.text)
	}
	s.starting = strings.HasSuffix(step.text, "&")
	s.t.Logf("$ %s\n%s(%s)", step.text, said, time.Since(begun).Round(time.Second))
	switch {
	case step.output == "" && status != "0":
		s.t.Errorf("%s: exit status %s", step.text, status)
	case step.output != "" && !matches(step.output, said):
		s.t.Errorf("%s\nprinted:\n%sThe page has:\n%s", step.text, said, step.output)
	default:
		return true
	}
	return false
}

// alike are words of which the pages have an example.
var alike = regexp.MustCompile(`^(/dev/loop\d+:?|\d+s)$`)

// matches compares what was printed with a page, word by word. There, ... stands for some letters, and on a line of
// its own for lines.
func matches(page, said string) bool {
	pattern := ""
	for line := range strings.Lines(page) {
		if strings.TrimSpace(line) == "..." {
			pattern += "(.*\n)*?"
			continue
		}
		for _, word := range strings.Fields(line) {
			if kind := alike.FindString(word); kind != "" {
				pattern += regexp.MustCompile(`\d+`).ReplaceAllString(word, `\d+`) + " "
			} else {
				pattern += strings.ReplaceAll(regexp.QuoteMeta(word), `\.\.\.`, ".*") + " "
			}
		}
		pattern += "\n"
	}
	said = strings.ReplaceAll(said, "bash: line ", "bash: ") // a number follows that a terminal has not
	said = regexp.MustCompile(`(?m)^bash: \d+: `).ReplaceAllString(said, "bash: ")
	said = regexp.MustCompile(`[ \t]*\n`).ReplaceAllString(regexp.MustCompile(`[ \t]+`).ReplaceAllString(said, " "), " \n")
	return regexp.MustCompile("^" + pattern + "$").MatchString(said)
}

func TestStepsOfAPage(t *testing.T) {
	const page = "## One\n```console\n$ a # b\nprinted /dev/loop0 3s...\n...\nend\n$ c\n```\n```yaml\n# /etc/f\nk: v\n```\n```go\nfunc\n```\n## Two\n```yaml\nother: 1\n```\n"
	steps, err := stepsOf(page)
	check.Must(t, err)
	want := []step{{"One", "a # b", "printed /dev/loop0 3s...\n...\nend\n", ""}, {"One", "c", "", ""}, {"One", "# /etc/f\nk: v\n", "", "/etc/f"}}
	if fmt.Sprint(steps) != fmt.Sprint(want) {
		t.Errorf("steps %q", steps)
	}
	for said, same := range map[string]bool{
		"printed  /dev/loop12 40 s\nend\n": false, "printed /dev/loop12 3s and so on\nx\ny\nend\n": true,
		"printed /dev/loop1 3s\nend\n": true, "printed /dev/sda 3s\nend\n": false, "printed /dev/loop1 3s\nend\nmore\n": false,
	} {
		if matches(want[0].output, said) != same {
			t.Errorf("%q: not %v", said, same)
		}
	}
	if _, err := stepsOf("```sh\nx\n```\n"); err == nil {
		t.Error("a block without prompts")
	}
}
