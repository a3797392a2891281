package openers

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// namer finds the processes that have an inode open, by an iterator over all descriptors of all
// threads. It sees no mapping and no descriptor that is passed: it names, and proves nothing.
type namer struct {
	files, tasks *ebpf.Program
	wanted       *ebpf.Map // the addresses of the inodes that are looked for
	turn         chan struct{}
}

// maxWanted is how many inodes are looked for at once: a device, and what it lies on as a loop device.
const maxWanted = 4

// nameLength bounds the names of programs and control groups.
const nameLength = 64

// hit is what the iterator writes for each descriptor that it finds, or for each thread.
type hit struct {
	Process    uint32
	Mode       uint32 // of the file; of a thread how long its table of descriptors is
	File       uint64 // its address: descriptors that are copies have the same
	Inode      uint64
	Comm       [16]byte
	Program    [nameLength]byte
	ControlSet [nameLength]byte
}

const (
	hitBytes  = 24 + 16 + 2*nameLength
	atHit     = -8 - hitBytes // on the stack
	atComm    = atHit + 24
	atProgram = atComm + 16
	atGroup   = atProgram + nameLength
)

func newNamer() (*namer, error) {
	defer btf.FlushKernelSpec()
	l, err := kernelLayout()
	if err != nil {
		return nil, err
	}
	file, task := l.file(), l.task()
	if l.err != nil {
		return nil, l.err
	}
	wanted, err := ebpf.NewMap(&ebpf.MapSpec{Name: "crust_wanted", Type: ebpf.Array, KeySize: 4, ValueSize: 8 * maxWanted, MaxEntries: 1})
	if err != nil {
		return nil, err
	}
	n := &namer{wanted: wanted, turn: make(chan struct{}, 1)}
	for over, program := range map[string]**ebpf.Program{"task_file": &n.files, "task": &n.tasks} {
		if *program, err = ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "crust_holders", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: over,
			Instructions: nameProgram(&file, &task, wanted.FD(), over == "task"), License: license,
		}); err != nil {
			return nil, err // what was made is closed with the garbage
		}
	}
	return n, nil
}

// nameProgram makes the program that the kernel runs for each descriptor, or for each thread. Its context holds, by
// 8 bytes each, the iteration, the thread and, for descriptors, their number and the file.
func nameProgram(f *fileFields, t *taskFields, wanted int, threads bool) asm.Instructions {
	const thread = scratch
	var c code
	c.add(asm.Mov.Reg(args, asm.R1), asm.LoadMem(thread, args, 8, asm.DWord))
	c.exitIfZero(thread)
	c.add(asm.Mov.Imm(asm.R1, 0))
	for at := int16(atHit); at < -8; at += 8 {
		c.add(asm.StoreMem(asm.RFP, at, asm.R1, asm.DWord))
	}
	if threads {
		c.read(keep, thread, f.files)
		c.read(keep, keep, f.table)
		c.read(keep, keep, f.most)
	} else {
		c.wantedFile(f, wanted)
	}
	c.add(asm.StoreMem(asm.RFP, atHit+4, keep, asm.Word))
	c.read(keep, thread, t.process)
	c.add(asm.StoreMem(asm.RFP, atHit, keep, asm.Word))
	c.text(atComm, 16, thread, t.comm)
	c.read(keep, thread, t.memory)
	c.read(keep, keep, t.program)
	c.add(asm.Add.Imm(keep, t.path.offset))
	c.read(keep, keep, t.entry)
	c.add(asm.Add.Imm(keep, t.entryName.offset))
	c.read(keep, keep, t.text)
	c.text(atProgram, nameLength, keep, field{})
	c.read(keep, thread, t.groups)
	c.read(keep, keep, t.group)
	c.read(keep, keep, t.node)
	c.read(keep, keep, t.nodeName)
	c.text(atGroup, nameLength, keep, field{})
	c.add(
		asm.LoadMem(asm.R1, args, 0, asm.DWord), asm.LoadMem(asm.R1, asm.R1, 0, asm.DWord), // the output
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, atHit), asm.Mov.Imm(asm.R3, hitBytes),
		asm.FnSeqWrite.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("end"), asm.Return(),
	)
	return c.ins
}

// wantedFile ends the program for a file that is not looked for, and leaves the mode of others in keep.
func (c *code) wantedFile(f *fileFields, wanted int) {
	c.add(asm.LoadMem(object, args, 24, asm.DWord))
	c.exitIfZero(object)
	c.read(keep, object, f.inode)
	c.add(asm.StoreMem(asm.RFP, atHit+16, keep, asm.DWord))
	c.jumpIfWanted(keep, wanted, "found")
	c.read(keep, object, f.mapping)
	c.read(keep, keep, f.host)
	c.add(asm.StoreMem(asm.RFP, atHit+16, keep, asm.DWord))
	c.jumpIfWanted(keep, wanted, "found")
	c.add(asm.Ja.Label("end"), asm.StoreMem(asm.RFP, atHit+8, object, asm.DWord).WithSymbol("found"))
	c.read(keep, object, f.mode)
}

// jumpIfWanted jumps if the inode at r is looked for.
func (c *code) jumpIfWanted(r asm.Register, wanted int, label string) {
	c.add(asm.JEq.Imm(r, 0, "end"), asm.LoadMapValue(asm.R1, wanted, 0))
	for i := range int16(maxWanted) {
		c.add(asm.LoadMem(asm.R2, asm.R1, 8*i, asm.DWord), asm.JEq.Reg(asm.R2, r, label))
	}
}

// text puts a text of the kernel, of at most size bytes, on the stack.
func (c *code) text(at int16, size int32, base asm.Register, f field) {
	c.add(
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, int32(at)), asm.Mov.Imm(asm.R2, size),
		asm.Mov.Reg(asm.R3, base), asm.Add.Imm(asm.R3, f.offset),
		asm.FnProbeReadKernelStr.Call(),
	)
}

const (
	// nameTime bounds a search for names, and the wait for its turn. A read of the iterator is not interrupted by it.
	nameTime = time.Second
	// maxSlots bounds the tables of the processes of some programs: others can give a program such a name.
	maxSlots = 1 << 18
	// maxHits bounds what is read of the descriptors that were found, and maxThreads of the threads.
	maxHits, maxThreads = 256, 1 << 18
)

// find lists who has one of the inodes open. With programs, it looks only into their processes until that is
// enough. Those with few descriptors are first: whoever gives many the name of such a program delays it little. That
// fails before Linux 6.1, and in a container that has other numbers for the processes.
func (n *namer) find(ctx context.Context, inodes []uint64, programs []string, enough func([]hit) bool) (found []hit, err error) {
	ctx, cancel := context.WithTimeout(ctx, nameTime)
	defer cancel()
	select {
	case n.turn <- struct{}{}:
		defer func() { <-n.turn }()
	case <-ctx.Done():
		return nil, os.ErrDeadlineExceeded
	}
	var value [maxWanted]uint64
	copy(value[:], inodes)
	if err := n.wanted.Put(uint32(0), value); err != nil {
		return nil, err
	}
	until := time.Now().Add(nameTime)
	if len(programs) == 0 {
		return iterate(n.files, 0, maxHits, until)
	}
	threads, err := iterate(n.tasks, 0, maxThreads, until)
	if err = errors.Join(err, InFirstNamespace()); err != nil {
		return nil, err
	}
	threads = slices.DeleteFunc(threads, func(h hit) bool { return !slices.Contains(programs, h.holder().Program) })
	slices.SortFunc(threads, func(a, b hit) int { return cmp.Or(cmp.Compare(a.Mode, b.Mode), cmp.Compare(a.Process, b.Process)) })
	slots := 0
	for _, one := range slices.CompactFunc(threads, func(a, b hit) bool { return a.Process == b.Process }) {
		if slots += int(one.Mode); slots > maxSlots {
			return found, os.ErrDeadlineExceeded
		}
		hits, err := iterate(n.files, one.Process, maxHits, until)
		if found = append(found, hits...); err != nil && !errors.Is(err, unix.ESRCH) {
			return found, err
		}
		if enough(found) {
			break
		}
	}
	return found, nil
}

// iterate runs a program over all threads, or over those of a process.
func iterate(program *ebpf.Program, process uint32, most int, until time.Time) ([]hit, error) {
	spec := iterSpec{fd: uint32(program.FD()), kind: unix.BPF_TRACE_ITER, of: &[3]uint32{1: process}, ofBytes: 12}          //nolint:gosec // a descriptor
	link, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_LINK_CREATE, uintptr(unsafe.Pointer(&spec)), unsafe.Sizeof(spec)) //nolint:gosec // as below
	if errno != 0 {
		return nil, os.NewSyscallError("bpf", errno)
	}
	defer sys.CloseFD(int(link))
	spec = iterSpec{fd: uint32(link)}                                                                                       //nolint:gosec // a descriptor
	iter, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_ITER_CREATE, uintptr(unsafe.Pointer(&spec)), unsafe.Sizeof(spec)) //nolint:gosec // the kernel's structure
	if errno != 0 {
		return nil, os.NewSyscallError("bpf", errno)
	}
	all := os.NewFile(iter, "bpf_iter")
	defer func() { _ = all.Close() }() // read-only
	return readHits(all, most, until)
}

// iterSpec is union bpf_attr of <linux/bpf.h> for an iterator of a program, or for one more run of it. Then of is
// union bpf_iter_link_info: a thread, process or pidfd.
type iterSpec struct {
	fd, target, kind, flags uint32
	of                      *[3]uint32
	ofBytes                 uint64
}

func readHits(all io.Reader, most int, until time.Time) (found []hit, err error) {
	raw := make([]byte, 0, 4<<10)
	for time.Now().Before(until) && len(found) < most {
		n, err := all.Read(raw[len(raw):cap(raw)])
		raw = raw[:len(raw)+n]
		for len(raw) >= hitBytes {
			var one hit
			if _, err := binary.Decode(raw, binary.NativeEndian, &one); err != nil {
				return found, err
			}
			found, raw = append(found, one), append(raw[:0:cap(raw)], raw[hitBytes:]...)
		}
		switch {
		case errors.Is(err, io.EOF):
			return found, nil
		case errors.Is(err, unix.EAGAIN): // the kernel made a pause
		case err != nil:
			return found, err
		}
	}
	if len(found) >= most {
		return found, errManyHits
	}
	return found, os.ErrDeadlineExceeded
}

var errManyHits = errors.New("there are too many")

func (h *hit) holder() Holder {
	return Holder{PID: int(h.Process), Program: cmp.Or(textOf(h.Program[:]), textOf(h.Comm[:])), Group: textOf(h.ControlSet[:])}
}

func textOf(raw []byte) string {
	text, _, _ := bytes.Cut(raw, []byte{0})
	return string(text)
}
