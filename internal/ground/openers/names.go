package openers

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// namer finds the processes that have an inode open, by an iterator over all descriptors of all
// threads. It sees no mapping and no descriptor that is passed: it names, and proves nothing.
type namer struct {
	program *ebpf.Program
	wanted  *ebpf.Map // the addresses of the inodes that are looked for
	turn    chan struct{}
}

// maxWanted is how many inodes are looked for at once: a device, and what it lies on as a loop device.
const maxWanted = 4

// nameLength bounds the names of programs and control groups.
const nameLength = 64

// hit is what the iterator writes for each descriptor that it finds.
type hit struct {
	Process    uint32
	Mode       uint32
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
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "crust_holders", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: "task_file",
		Instructions: nameProgram(&file, &task, wanted.FD()), License: license,
	})
	if err != nil {
		return nil, errors.Join(err, wanted.Close())
	}
	return &namer{program: program, wanted: wanted, turn: make(chan struct{}, 1)}, nil
}

// nameProgram makes the program that the kernel runs for each descriptor. Its context holds, by
// 8 bytes each, the iteration, the thread, the number of the descriptor, and the file.
func nameProgram(f *fileFields, t *taskFields, wanted int) asm.Instructions {
	const thread = scratch
	var c code
	c.add(asm.Mov.Reg(args, asm.R1),
		asm.LoadMem(thread, args, 8, asm.DWord), asm.LoadMem(object, args, 24, asm.DWord))
	c.exitIfZero(thread)
	c.exitIfZero(object)
	c.add(asm.Mov.Imm(asm.R1, 0))
	for at := int16(atHit); at < -8; at += 8 {
		c.add(asm.StoreMem(asm.RFP, at, asm.R1, asm.DWord))
	}
	c.read(keep, object, f.inode)
	c.add(asm.StoreMem(asm.RFP, atHit+16, keep, asm.DWord))
	c.jumpIfWanted(keep, wanted, "found")
	c.read(keep, object, f.mapping)
	c.read(keep, keep, f.host)
	c.add(asm.StoreMem(asm.RFP, atHit+16, keep, asm.DWord))
	c.jumpIfWanted(keep, wanted, "found")
	c.add(asm.Ja.Label("end"))
	c.add(asm.StoreMem(asm.RFP, atHit+8, object, asm.DWord).WithSymbol("found"))
	c.read(keep, object, f.mode)
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
	// nameTime bounds the search for names. A read of the iterator is not interrupted by it.
	nameTime = time.Second
	// maxHits bounds what is read of the descriptors that were found.
	maxHits = 256
)

// find lists who has one of the inodes open.
func (n *namer) find(inodes []uint64) ([]hit, error) {
	n.turn <- struct{}{}
	defer func() { <-n.turn }()
	var value [maxWanted]uint64
	copy(value[:], inodes)
	if err := n.wanted.Put(uint32(0), value); err != nil {
		return nil, err
	}
	iter, err := link.AttachIter(link.IterOptions{Program: n.program})
	if err != nil {
		return nil, err
	}
	defer func() { _ = iter.Close() }()
	all, err := iter.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = all.Close() }()
	return readHits(all, time.Now().Add(nameTime))
}

func readHits(all io.Reader, until time.Time) (found []hit, err error) {
	raw := make([]byte, 0, 4<<10)
	for time.Now().Before(until) && len(found) < maxHits {
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
	return found, os.ErrDeadlineExceeded
}

func (h *hit) holder() Holder {
	program := textOf(h.Program[:])
	if program == "" {
		program = textOf(h.Comm[:])
	}
	return Holder{PID: int(h.Process), Program: program, Group: textOf(h.ControlSet[:])}
}

func textOf(raw []byte) string {
	text, _, _ := bytes.Cut(raw, []byte{0})
	return string(text)
}
