package openers

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers/scan"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Process is a process that has a device open, held by a pidfd: it cannot be taken for another one that
// gets its number later.
type Process struct {
	Holder
	// Path is its control group.
	Path string
	// groups and args are the elements of the paths of all its control groups, and its arguments.
	groups, args []string
	fd           int
}

// ErrOtherNumbers is the error where the numbers of processes are not those of this process's namespace.
var ErrOtherNumbers = errors.New("crust-proxy runs in a container that does not see the node's processes (hostPID: false)")

// InFirstNamespace fails where the count names no process outside of this container, and others by other numbers.
func InFirstNamespace() error {
	own, err := os.Readlink("/proc/self/ns/pid")
	if err == nil && own != scan.InitialPIDs {
		err = ErrOtherNumbers
	}
	return err
}

func openProcess(of Holder) (*Process, error) {
	fd, err := unix.PidfdOpen(of.PID, 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	p := &Process{Holder: of, fd: fd}
	if err := errors.Join(p.readNames(), p.signal(0)); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Close closes the pidfd.
func (p *Process) Close() { sys.CloseFD(p.fd) }

const maxNameBytes = 256 << 10

func (p *Process) readNames() error {
	groups, err := readHead(fmt.Sprintf("/proc/%d/cgroup", p.PID))
	if err != nil {
		return err
	}
	args, err := readHead(fmt.Sprintf("/proc/%d/cmdline", p.PID))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(groups)) {
		if _, path, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ":/"); ok {
			if len("/"+path) >= len(p.Path) { // a process has groups of version 1, and one of version 2, which may be the root
				p.Path = "/" + path
			}
			p.groups = append(p.groups, strings.Split(path, "/")...)
		}
	}
	p.args = strings.Split(string(bytes.TrimRight(args, "\x00")), "\x00")
	return nil
}

func readHead(path string) ([]byte, error) {
	file, err := os.Open(path) //nolint:gosec // a file of the kernel's
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // read-only
	return io.ReadAll(io.LimitReader(file, maxNameBytes))
}

// sandboxID is the form of the ids that containerd and CRI-O give to sandboxes.
var sandboxID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// InGroups returns the ids of sandboxes and containers in the process's control groups. Parts of ids do not count.
func (p *Process) InGroups() []string { return idsIn(p.groups) }

// InArguments returns those in its arguments.
func (p *Process) InArguments() []string { return idsIn(p.args) }

func idsIn(texts []string) (ids []string) {
	isSeparator := func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }
	for _, text := range texts {
		for _, part := range strings.FieldsFunc(text, isSeparator) {
			if sandboxID.MatchString(part) && !slices.Contains(ids, part) {
				ids = append(ids, part)
			}
		}
	}
	return ids
}

// IsOfPod reports whether one of the process's control groups is in that of a pod, as kubelet names it.
func (p *Process) IsOfPod(uid string) bool {
	return uid != "" && slices.ContainsFunc(p.groups, func(group string) bool {
		if group == "pod"+uid {
			return true
		}
		slice, isSlice := strings.CutSuffix(group, ".slice") // systemd's form
		return isSlice && strings.HasSuffix(slice, "-pod"+strings.ReplaceAll(uid, "-", "_"))
	})
}

// Ended reports whether all threads of the process have ended: then it has nothing
// open, except, for a moment, what it has registered with io_uring.
func (p *Process) Ended() bool {
	ready, err := unix.Poll([]unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}, 0) //nolint:gosec // a descriptor
	return err == nil && ready > 0
}

// Kill ends the process, if it has not ended.
func (p *Process) Kill() error {
	if err := p.signal(unix.SIGKILL); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

func (p *Process) signal(s unix.Signal) error {
	return os.NewSyscallError("pidfd_send_signal", unix.PidfdSendSignal(p.fd, s, nil, 0))
}
