//go:build system

package openers

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestCountAndModelAgree opens, closes, copies, maps, passes and inherits at random. After each step
// the kernel counts as many opens of each device as a model knows of.
func TestCountAndModelAgree(t *testing.T) {
	const fewest, scanEach = 1000, 500
	seed := uint64(time.Now().UnixNano()) //nolint:gosec // any number
	t.Logf("the seed is %d", seed)
	m := newModel(t, rand.New(rand.NewPCG(seed, 0))) //nolint:gosec // no secret
	for step, began := 0, time.Now(); step < fewest || time.Since(began) < rig.RaceTime(); step++ {
		what := m.step()
		for i := range m.disks {
			m.compare(i)
		}
		if step%scanEach == 0 {
			m.compareScan()
		}
		check.Require(t, !t.Failed(), "in step %d, after %s", step, what)
	}
	t.Logf("%v", m.did)
}

// model knows of each open file by what keeps it open.
type model struct {
	t          *testing.T
	rand       *rand.Rand
	f          *openers.Finder
	disks      []string
	references []reference
	// socket has descriptors that are being passed, those of passing in their order.
	socket  [2]int
	passing []*file
	did     map[string]int
}

type file struct {
	disk int
	uses int
}

// reference is what keeps a file open: a descriptor, a mapping, or a child that inherited it.
type reference struct {
	*file
	fd      int // that of a descriptor
	visible bool
	end     func() error
}

func newModel(t *testing.T, random *rand.Rand) *model {
	t.Helper()
	m := &model{t: t, rand: random, f: counting(t), did: make(map[string]int)}
	for range 3 {
		m.disks = append(m.disks, rig.Disk(t, 4*mib, ""))
	}
	m.socket = check.Value(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))(t)
	t.Cleanup(func() {
		for len(m.references) > 0 {
			m.end(0)
		}
		for _, fd := range m.socket {
			sys.CloseFD(fd)
		}
	})
	return m
}

// step does something that is possible, and returns what it was.
func (m *model) step() (what string) {
	const most = 24 // references, and passed descriptors
	descriptors := slices.DeleteFunc(slices.Clone(m.references), func(k reference) bool { return k.fd == sys.NoFD })
	n := m.rand.IntN(100)
	switch {
	case len(m.references) > 0 && (n < 45 || len(m.references) > most):
		m.end(m.rand.IntN(len(m.references)))
		what = "an end"
	case len(m.passing) > 0 && (n < 55 || len(m.passing) > most):
		m.receive()
		what = "a descriptor that arrived"
	case len(descriptors) == 0 || n < 65:
		m.open(m.rand.IntN(len(m.disks)))
		what = "an open"
	default:
		what = m.use(descriptors[m.rand.IntN(len(descriptors))], n)
	}
	m.did[what]++
	return what
}

// use makes something of a descriptor.
func (m *model) use(k reference, n int) (what string) {
	switch {
	case n < 75:
		fd, err := unix.FcntlInt(uintptr(k.fd), unix.F_DUPFD_CLOEXEC, 3)
		m.addDescriptor(k.file, fd, err)
		return "a copy"
	case n < 85:
		raw, err := unix.Mmap(k.fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		m.add(reference{k.file, sys.NoFD, false, func() error { return unix.Munmap(raw) }}, err)
		return "a mapping"
	case n < 97:
		check.Must(m.t, unix.Sendmsg(m.socket[0], []byte{0}, unix.UnixRights(k.fd), nil, 0))
		k.uses++
		m.passing = append(m.passing, k.file)
		return "a descriptor that was sent"
	default:
		end, err := inherit(k.fd)
		m.add(reference{k.file, sys.NoFD, true, end}, err)
		return "a child"
	}
}

func (m *model) open(disk int) {
	flags := unix.O_CLOEXEC | []int{unix.O_RDONLY, unix.O_RDWR}[m.rand.IntN(2)]
	fd, err := unix.Open(m.disks[disk], flags, 0)
	m.addDescriptor(&file{disk: disk}, fd, err)
}

func (m *model) receive() {
	control := make([]byte, unix.CmsgSpace(4))
	_, _, _, _, err := unix.Recvmsg(m.socket[1], make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC)
	check.Must(m.t, err)
	messages := check.Value(unix.ParseSocketControlMessage(control))(m.t)
	fds, err := unix.ParseUnixRights(&messages[0])
	m.addDescriptor(m.passing[0], fds[0], err)
	m.passing[0].uses--
	m.passing = m.passing[1:]
}

// inherit starts a process with a copy of a descriptor.
func inherit(fd int) (end func() error, err error) {
	fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "inherited")
	defer func() { _ = file.Close() }()
	cmd := exec.Command("cat")
	cmd.ExtraFiles = []*os.File{file}
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	return func() error { _ = stdin.Close(); return cmd.Wait() }, err
}

func (m *model) addDescriptor(f *file, fd int, err error) {
	m.add(reference{f, fd, true, func() error { return unix.Close(fd) }}, err)
}

func (m *model) add(k reference, err error) {
	m.t.Helper()
	check.Must(m.t, err)
	k.uses++
	m.references = append(m.references, k)
}

func (m *model) end(i int) {
	k := m.references[i]
	m.references = slices.Delete(m.references, i, i+1)
	k.uses--
	check.Must(m.t, k.end())
}

// opens is how often the model has a disk open.
func (m *model) opens(disk int) int {
	files := make(map[*file]bool)
	for _, k := range m.references {
		files[k.file] = k.disk == disk
	}
	for _, f := range m.passing {
		files[f] = f.disk == disk
	}
	n := 0
	for _, of := range files {
		if of {
			n++
		}
	}
	return n
}

// compare has the finder agree with the model, and with no other number.
func (m *model) compare(disk int) {
	m.t.Helper()
	fd := check.Value(unix.Open(m.disks[disk], unix.O_RDONLY|unix.O_CLOEXEC, 0))(m.t)
	defer sys.CloseFD(fd)
	opens := m.opens(disk)
	// Other programs of this machine look at loop devices: the count may be higher for a moment.
	err := check.Until(patience, 10*time.Millisecond, func() error {
		right := openers.Query{FD: fd, Own: opens + 1}
		if users, err := m.f.Await(m.t.Context(), right, 0); err != nil || users.Names != "" {
			return fmt.Errorf("disk %d is open in %+v besides the model's %d, %w", disk, users, opens, err)
		}
		tooMany := openers.Query{FD: fd, Own: opens + 2}
		if users, err := m.f.Await(m.t.Context(), tooMany, 0); err == nil {
			return fmt.Errorf("disk %d is open in %+v besides one more than the model's %d", disk, users, opens)
		}
		return nil
	})
	check.That(m.t, err == nil, "%v", err)
	if m.rand.IntN(200) > 0 {
		return // names take longer
	}
	tooFew := openers.Query{FD: fd, Own: opens}
	users, err := m.f.Await(m.t.Context(), tooFew, 0)
	check.That(m.t, err == nil && users.Names != "", "disk %d is free with one open less than the model's %d, %v", disk, opens, err)
}

// compareScan has another process look for openers by a scan: it sees descriptors, and nothing else.
func (m *model) compareScan() {
	m.t.Helper()
	for i, disk := range m.disks {
		isVisible := slices.ContainsFunc(m.references, func(k reference) bool { return k.disk == i && k.visible })
		err := check.Until(patience, 10*time.Millisecond, func() error {
			out, err := inRole("scan", disk).Output()
			if err == nil && (len(out) > 0) != isVisible {
				err = fmt.Errorf("a scan sees %q on the disk %d; the model has descriptors: %v", out, i, isVisible)
			}
			return err
		})
		check.That(m.t, err == nil, "%v", err)
	}
}

// printScan is the role of a process that prints who has a device open.
func printScan(path string) error {
	disk, err := os.Open(path) //nolint:gosec // of the test
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	users, err := scanning().Await(context.Background(), openers.Query{FD: int(disk.Fd()), Own: 1, Claimed: true}, 0)
	if err != nil {
		return err
	}
	_, err = io.WriteString(os.Stdout, users.Names)
	return err
}
