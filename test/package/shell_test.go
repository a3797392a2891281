//go:build system

package package_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
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
		if language != "console" && strings.Contains("\n"+text, "\n$ ") {
			return nil, fmt.Errorf("a block of %q in %q has a prompt: print commands as console", language, section)
		}
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
// nothing is left of the machine: the loop devices over its files would stay.
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
		_ = said.Close() // a command that has more to say ends of it
		_ = in.Close()
		late := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // the machine goes off under it
		late.Stop()
	})
	s.typed(leave)
	s.typed("trap leave EXIT; cd")
	return s
}

// leave is for the end of a test that was killed. Only devices over a file that the machine has are asked.
const leave = `leave() {
	exec >/dev/null 2>&1 # nobody may read it any more
	for loop in /sys/block/loop*/loop; do
		file=$(cat $loop/backing_file 2>/dev/null) && [ -f "$file" ] || continue
		device=${loop%/loop} device=/dev/${device##*/}
		over=$(losetup --noheadings --raw --output BACK-MAJ:MIN,BACK-INO $device)
		[ "$over" != "$(stat --format='%Hd:%Ld %i' "$file")" ] || losetup --detach $device
	done
	systemctl poweroff --force --force
}`

// detachOver frees the loop devices that are over files of some filesystems, and closes what was open there. While
// it is open, no other filesystem has its number.
func detachOver(t *testing.T, open []*os.File) {
	var looks sys.Looks[string]
	numbers := map[uint64]bool{}
	for _, file := range open {
		var stat unix.Stat_t
		check.Must(t, unix.Fstat(int(file.Fd()), &stat))
		numbers[stat.Dev] = true
	}
	backings := check.Value(filepath.Glob("/sys/block/loop*/loop/backing_file"))(t) // free devices have none
	for _, backing := range backings {
		device := "/dev/" + strings.Split(backing, "/")[3]
		_, err := sys.Look(&looks, device, func() (bool, error) {
			return true, rig.DetachIf(device, func(loop *os.File) bool {
				info, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
				return err == nil && numbers[info.Device] // else it was freed, or its file is no machine's
			})
		})
		gone := errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENXIO)
		check.That(t, err == nil || gone || errors.Is(err, sys.ErrHangs), "%s: %v", device, err) // another's file may hang
	}
	for _, file := range open {
		_ = file.Close()
	}
}

// typed types a command, and returns what was printed and the exit status.
func (s *shell) typed(command string) (said, status string) {
	s.t.Helper()
	const end = "\x04end "
	check.Must(s.t, check.Err(fmt.Fprintf(s.in, "{ %s\n} </dev/null\nprintf '%s%%s\\n' $?\n", command, end)))
	limit := time.Now().Add(10 * time.Minute)
	if end, has := s.t.Deadline(); has && limit.After(end.Add(-time.Minute)) {
		limit = end.Add(-time.Minute) // leaves time to clean up
	}
	check.Must(s.t, s.said.SetReadDeadline(limit))
	for {
		line, err := s.out.ReadString('\n')
		check.Require(s.t, err == nil, "%s: %v; until then it printed:\n%s%s", command, err, said, line)
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
	for s.again(step, said, status) && time.Since(begun) < 2*time.Minute {
		time.Sleep(200 * time.Millisecond)
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

// again reports whether a command is repeated: who types is slower than a program that starts, and repeats what
// crust-proxy asks to repeat.
func (s *shell) again(step step, said, status string) bool {
	aborted := strings.HasSuffix(strings.TrimSpace(said), "(Aborted)") && !matches(step.output, said)
	return status != "0" && (s.starting || aborted)
}

var (
	// alike are words of which the pages have an example.
	alike = regexp.MustCompile(`^(/dev/loop\d+:?|\d+s)$`)
	// figures are what a filesystem has, where a line also has the share: it depends on mkfs and the kernel.
	figures = regexp.MustCompile(`^[\d.]+([KMG](iB)?|%)?$`)
)

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
			} else if unit := figures.FindStringSubmatch(word); unit != nil && strings.Contains(line, "%") {
				pattern += `[\d.]+` + unit[1] + " "
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

func TestDetachOver(t *testing.T) {
	root, other := overlay(t, "/", "size=8m"), rig.Image(t, 1<<20)
	image := filepath.Join(root, "image")
	check.Must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	ours := check.Value(loopdev.Attach(image, loopdev.Options{}))(t)
	defer func() { _ = loopdev.DetachFrom(image, ours) }()
	others := check.Value(loopdev.Attach(other, loopdev.Options{}))(t)
	defer func() { check.Must(t, loopdev.DetachFrom(other, others)) }()
	detachOver(t, []*os.File{check.Value(os.Open(filepath.Join(root, "etc/machine-id")))(t)})
	check.Eventually(t, "detach", func() bool {
		left, err := loopdev.Over(image)
		return err == nil && len(left) == 0
	})
	left, err := loopdev.Over(other)
	check.That(t, err == nil && len(left) == 1, "another's device: %v, %v", left, err)
}
