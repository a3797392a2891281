package openers

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// look counts the openers of a device, of what it lies on if it is a loop device, and of loop devices
// over its stack.
func (c *counter) look(q Query, file File) (found, error) {
	got, err := c.count(q.FD, file)
	if err != nil {
		return found{}, err
	}
	others, at := got.opens, file
	if file.Block {
		others -= q.Own
	}
	besides, err := c.openedBeside(q.Beside)
	skip := append([]File{file}, q.Beside...)
	for below, depth := got, 0; err == nil; depth++ {
		got.inodes, got.images = union(got.inodes, below.inodes), union(got.images, below.images)
		if others == 0 && below.under.Block {
			at = below.under
		}
		others += below.below
		if !IsLoop(below.under) {
			break
		}
		skip = append(skip, below.under)
		below, err = c.countNode(below.under, depth)
	}
	others -= besides
	if err != nil {
		return found{}, err
	}
	if others < 0 {
		return found{}, fmt.Errorf("the kernel counts %d openers of %s less than there are here", -others, file)
	}
	if others > 0 && len(q.Servers) > 0 && c.areServers(&got, others, q.Servers) {
		others = 0
	}
	if others == 0 && len(q.Stack) > 0 {
		return c.lookAtStack(&q, skip)
	}
	return found{count: others, users: func() Users { return c.name(&got, others, q, at, skip) }}, nil
}

// lookAtStack looks for loop devices over the stack, and for others who have open what is under one of
// its loop devices.
func (c *counter) lookAtStack(q *Query, skip []File) (found, error) {
	for _, device := range q.Stack {
		if !IsLoop(device) {
			continue
		}
		got, err := c.countNode(device, 0)
		if err != nil {
			return found{}, err
		}
		if got.below > 0 {
			return found{count: got.below, users: func() Users { return c.name(&got, got.below, *q, device, skip) }}, nil
		}
	}
	loop, err := c.loopOver(nil, q.Stack, skip)
	return foundLoop(loop), err
}

func union(all, more []uint64) []uint64 {
	for _, one := range more {
		if !slices.Contains(all, one) {
			all = append(all, one)
		}
	}
	return all
}

// openedBeside counts how often some loop devices have open what they lie on.
func (c *counter) openedBeside(loops []File) (n int, err error) {
	for _, loop := range loops {
		got, err := c.countNode(loop, 0)
		if err != nil {
			return 0, err
		}
		n += got.ofLoop
	}
	return n, nil
}

// loopOver finds a loop device over one of the inodes or block devices, other than those to skip. What
// it lies on is read from the kernel's memory: a filesystem that hangs is not asked.
func (c *counter) loopOver(inodes []uint64, devices, skip []File) (string, error) {
	return findLoop(skip, func(loop File) (bool, error) {
		got, err := c.countNode(loop, 0)
		under := got.inodes[min(1, len(got.inodes)):]
		return slices.Contains(devices, got.under) || len(under) > 0 && slices.Contains(inodes, under[0]), err
	})
}

// countNode counts a loop device that another one lies on.
func (c *counter) countNode(file File, depth int) (count, error) {
	if depth == maxLayers {
		return count{}, fmt.Errorf("%d loop devices lie over one another", maxLayers)
	}
	fd, err := unix.Open(NodeOf(file), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return count{}, fmt.Errorf("%s: %w", file, err)
	}
	defer sys.CloseFD(fd)
	return c.count(fd, file)
}

// areServers reports whether all others are programs that serve the device. If several processes
// share an open file, each of them has to be one.
func (c *counter) areServers(of *count, others int, servers []string) bool {
	found, err := c.holders(of)
	return err == nil && found.files == others && !slices.ContainsFunc(found.processes, func(h Holder) bool {
		return !slices.Contains(servers, h.Program)
	})
}

// maxNames bounds how many processes are named.
const maxNames = 3

// name names the others for a person. It never says that there is nobody.
func (c *counter) name(of *count, others int, q Query, at File, skip []File) Users {
	have, err := c.holders(of)
	names := namesOf(have.processes)
	unnamed := others - have.files
	if mine := have.ownFiles - q.Own; mine > 0 && at.Block {
		names, unnamed = append(names, "this process, which reads it"), unnamed-mine
	}
	if unnamed > 0 {
		names = append(names, c.nameUnseen(of.inodes, append(q.Stack, at), skip))
	}
	if err != nil {
		names = append(names, fmt.Sprintf("maybe others (processes could not be named: %v)", err))
	}
	return Users{Names: strings.Join(names, ", "), Kernel: len(have.processes) == 0}
}

// nameUnseen says for a person what has a device open besides processes. The last of the devices is
// where the kernel counts more.
func (c *counter) nameUnseen(inodes []uint64, devices, skip []File) string {
	loop, err := c.loopOver(inodes, devices, skip)
	if err == nil && loop != "" {
		return foundLoop(loop).users().Names
	}
	return KernelUsers(devices[len(devices)-1])
}

// namesOf names some of the processes.
func namesOf[T fmt.Stringer](processes []T) (names []string) {
	for _, who := range processes[:min(maxNames, len(processes))] {
		names = append(names, who.String())
	}
	if more := len(processes) - maxNames; more > 0 {
		names = append(names, fmt.Sprintf("%d more processes", more))
	}
	return names
}

// holders are the processes that have a device open, and the files by which they have: copies of a
// descriptor are one file.
type holders struct {
	processes       []Holder
	files, ownFiles int
}

func (c *counter) holders(of *count) (holders, error) {
	names, err := c.namer()
	if err != nil {
		return holders{}, err
	}
	hits, err := names.find(of.inodes)
	hits = slices.DeleteFunc(hits, func(h hit) bool { return h.Mode&toWrite == 0 && slices.Contains(of.images, h.Inode) })
	return holdersOf(hits, of.self), err
}

func holdersOf(hits []hit, self uint32) (out holders) {
	const own, foreign = 1, 2
	files := make(map[uint64]int)
	for _, h := range hits {
		if h.Process == self {
			files[h.File] = own // also if a fork of ours, or systemd's store, has a copy
		} else if files[h.File] == 0 {
			files[h.File] = foreign
		}
	}
	for _, whose := range files {
		if whose == own {
			out.ownFiles++
		} else {
			out.files++
		}
	}
	for _, h := range hits {
		if who := h.holder(); files[h.File] == foreign && !slices.Contains(out.processes, who) {
			out.processes = append(out.processes, who)
		}
	}
	return out
}
