package openers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// look counts the openers of a device, of what it lies on if it is a loop device, and of loop devices over its stack. A
// loop device that nobody has open is no user of a block device: it is looked for if the caller says so.
func (c *counter) look(ctx context.Context, q Query, file File, idle bool) (found, error) {
	got, err := c.others(&q, file)
	if err == nil && got.others > 0 && idle && file.Block {
		got, err = c.withoutIdle(&q, got)
	}
	if err != nil {
		return found{}, err
	}
	if got.others > 0 && len(q.Servers) > 0 && c.areServers(ctx, &got.count, got.others, q.Servers) {
		got.others = 0
	}
	if got.others == 0 && len(q.Stack) > 0 {
		return c.lookAtStack(ctx, &q, got)
	}
	return found{count: got.others, users: func() Users { return c.name(ctx, &got, q) }}, nil
}

// counted is what was counted of a device and all that it lies on.
type counted struct {
	count
	file   File
	others int  // without the caller's own opens
	at     File // where the first of them were counted
	layers []File
}

func (c *counter) others(q *Query, file File) (counted, error) {
	first, err := c.count(q.FD, file)
	if err != nil {
		return counted{}, err
	}
	out := counted{count: first, file: file, others: first.opens, at: file, layers: []File{file}}
	if file.Block {
		out.others -= q.Own
	}
	for below, depth := first, 0; ; depth++ {
		out.inodes, out.images = union(out.inodes, below.inodes), union(out.images, below.images)
		if out.others == 0 && below.under.Block {
			out.at = below.under
		}
		out.others += below.below
		if !IsLoop(below.under) {
			break
		}
		out.layers = append(out.layers, below.under)
		if below, err = c.countNode(below.under, depth); err != nil {
			return counted{}, err
		}
	}
	for _, loop := range q.Beside {
		got, err := c.countNode(loop, 0)
		if err != nil {
			return counted{}, err
		}
		out.others -= got.ofLoop
	}
	if out.others < 0 {
		return counted{}, fmt.Errorf("the kernel counts %d openers of %s less than there are here", -out.others, file)
	}
	return out, nil
}

// withoutIdle counts again without the loop devices that nobody has open. They must be the same before
// and after the count.
func (c *counter) withoutIdle(q *Query, got counted) (counted, error) {
	before, n, err := c.idleLoops(q, &got)
	if err != nil || n == 0 {
		return got, err
	}
	again, err := c.others(q, got.file)
	if err != nil {
		return got, err
	}
	after, _, err := c.idleLoops(q, &got)
	if err == nil && slices.Equal(before, after) {
		again.others -= min(n, again.others)
	}
	return again, err
}

// idleLoops lists the loop devices over what was counted that nobody has open, and counts how often they
// have that open.
func (c *counter) idleLoops(q *Query, of *counted) (idle []File, opens int, err error) {
	err = eachLoop(slices.Concat(of.layers, q.Beside), func(loop File) (more bool, err error) {
		const ours = 1
		if slices.Contains(q.Expected, loop) || mayWait(loop, nil) {
			return true, nil // it is not idle
		}
		// One that cannot be counted is not known to be idle: that stops no other volume.
		if got, err := c.countNode(loop, 0); err == nil && got.opens == ours && got.isOver(of.inodes) {
			idle, opens = append(idle, loop), opens+got.ofLoop
		}
		return true, nil
	})
	return idle, opens, err
}

func (c *count) isOver(inodes []uint64) bool {
	return len(c.inodes) > 1 && slices.Contains(inodes, c.inodes[1])
}

// lookAtStack looks for loop devices over the stack that somebody uses, and for others who have open
// what is under one of its loop devices.
func (c *counter) lookAtStack(ctx context.Context, q *Query, of counted) (found, error) {
	for _, device := range q.Stack {
		if !IsLoop(device) {
			continue
		}
		got, err := c.countNode(device, 0)
		if err != nil {
			return found{}, err
		}
		if got.below > 0 {
			under := counted{count: got, others: got.below, at: device, layers: of.layers}
			return found{count: got.below, users: func() Users { return c.name(ctx, &under, *q) }}, nil
		}
	}
	loop, used, err := c.loopOver(q, nil, q.Stack, of.layers)
	if err != nil || !used {
		return found{}, err
	}
	return found{count: 1, users: func() Users { return Users{Names: c.nameLoop(ctx, loop), Kernel: true} }}, nil
}

func union(all, more []uint64) []uint64 {
	for _, one := range more {
		if !slices.Contains(all, one) {
			all = append(all, one)
		}
	}
	return all
}

// loopOver finds a loop device over one of the inodes or block devices, other than those to skip, and reports
// whether somebody has it open, or is expected to. What it lies on is read from the kernel's memory: a filesystem
// that hangs is not asked.
func (c *counter) loopOver(q *Query, inodes []uint64, devices, skip []File) (over *counted, used bool, err error) {
	err = eachLoop(slices.Concat(skip, q.Beside), func(loop File) (more bool, err error) {
		if mayWait(loop, devices) {
			return true, nil
		}
		got, err := c.countNode(loop, 0)
		if err != nil && !IsNoDevice(err) && mayLieOn(loop, devices) {
			return false, err
		}
		if err != nil || !slices.Contains(devices, got.under) && !got.isOver(inodes) {
			return true, nil // an unknown device of others stops no volume
		}
		over, used = &counted{count: got, file: loop}, got.opens > 1 || slices.Contains(q.Expected, loop) // one open is ours
		return !used, nil
	})
	return over, used, err
}

// nameLoop names a loop device that loopOver found for a person, and who has it open.
func (c *counter) nameLoop(ctx context.Context, over *counted) string {
	name := "this node's kernel: the loop device " + NodeOf(over.file) + " lies on it, or on the same data"
	if have, err := c.holders(ctx, &over.count, over.opens-1); err == nil && len(have.processes) > 0 {
		name += ", and is open in " + strings.Join(namesOf(have.processes), ", ")
	}
	return name
}

// countNode counts a loop device that another one lies on.
func (c *counter) countNode(file File, depth int) (count, error) {
	if depth == maxLayers {
		return count{}, fmt.Errorf("more than %d loop devices are stacked", maxLayers)
	}
	return lookAt(file, sys.NoFD, func(fd int) (count, error) { return c.count(fd, file) })
}

// areServers reports whether all others are programs that serve the device: the opens of these programs are all that
// the kernel counts. If several processes share an open file, each of them has to be one, but what is not known of
// the node's other processes stops no volume.
func (c *counter) areServers(ctx context.Context, of *count, others int, servers []string) bool {
	names, err := c.namer(true)
	if err != nil {
		return false
	}
	known := func(hits []hit) bool { return of.holders(hits).files == others }
	hits, err := names.find(ctx, of.inodes, servers, known)
	if !known(hits) && (err == nil || errors.Is(err, os.ErrDeadlineExceeded)) {
		return false
	}
	all, err := c.holders(ctx, of, others)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	return (known(hits) || all.files == others) && !slices.ContainsFunc(all.processes, func(h Holder) bool {
		return !slices.Contains(servers, h.Program)
	})
}

// maxNames bounds how many processes are named.
const maxNames = 3

// name names the others for a person. It never says that there is nobody.
func (c *counter) name(ctx context.Context, of *counted, q Query) Users {
	have, err := c.holders(ctx, &of.count, of.others)
	names := namesOf(have.processes)
	unnamed := of.others - have.files
	if mine := have.ownFiles - q.Own; mine > 0 && of.at.Block {
		names, unnamed = append(names, "this process, which reads it"), unnamed-mine
	}
	if err != nil {
		names = append(names, fmt.Sprintf("maybe others (processes could not be named: %v)", err))
	}
	if unnamed > 0 {
		names = append(names, c.nameUnseen(ctx, of, &q))
	}
	return Users{Names: strings.Join(names, ", "), Kernel: len(have.processes) == 0 && (err == nil || of.at.Block && userInKernel(of.at) != "")}
}

// nameUnseen says for a person what has a device open besides processes.
func (c *counter) nameUnseen(ctx context.Context, of *counted, q *Query) string {
	loop, _, err := c.loopOver(q, of.inodes, append(slices.Clone(q.Stack), of.at), of.layers)
	if err == nil && loop != nil {
		return c.nameLoop(ctx, loop) + "; detach it"
	}
	return KernelUsers(of.at)
}

func namesOf(processes []Holder) (names []string) {
	names = sys.Map(processes[:min(maxNames, len(processes))], Holder.String)
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

// holders names the processes that have open what was counted. In a container, some of the others may be missing.
func (c *counter) holders(ctx context.Context, of *count, others int) (holders, error) {
	names, err := c.namer(false)
	if err != nil {
		return holders{}, err
	}
	hits, err := names.find(ctx, of.inodes, nil, nil)
	out := of.holders(hits)
	if err == nil && out.files < others {
		err = InFirstNamespace()
	}
	return out, err
}

func (c *count) holders(hits []hit) holders {
	reads := func(h hit) bool { return h.Mode&toWrite == 0 && slices.Contains(c.images, h.Inode) }
	return holdersOf(slices.DeleteFunc(slices.Clone(hits), reads), c.self)
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
	var n [foreign + 1]int
	for _, whose := range files {
		n[whose]++
	}
	out.ownFiles, out.files = n[own], n[foreign]
	for _, h := range hits {
		if who := h.holder(); files[h.File] == foreign && !slices.Contains(out.processes, who) {
			out.processes = append(out.processes, who)
		}
	}
	return out
}
