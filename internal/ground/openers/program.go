package openers

import (
	"fmt"
	"math"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// The registers that a call of a helper leaves alone.
const (
	args    = asm.R6
	object  = asm.R7 // the structure that is read
	keep    = asm.R8
	scratch = asm.R9
)

// code assembles a program.
type code struct{ ins asm.Instructions }

func (c *code) add(ins ...asm.Instruction) { c.ins = append(c.ins, ins...) }

// read puts a member of the structure at base into to. What cannot be read is 0.
func (c *code) read(to, base asm.Register, f field) {
	c.add(
		asm.Mov.Imm(asm.R1, 0), asm.StoreMem(asm.RFP, -8, asm.R1, asm.DWord),
		asm.Mov.Reg(asm.R3, base), asm.Add.Imm(asm.R3, f.offset),
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, -8),
		asm.Mov.Imm(asm.R2, f.bytes),
		asm.FnProbeReadKernel.Call(),
		asm.LoadMem(to, asm.RFP, -8, f.size),
	)
}

// save reads a member and stores it in the context.
func (c *code) save(at int16, base asm.Register, f field) {
	c.read(scratch, base, f)
	c.add(asm.StoreMem(args, at, scratch, asm.DWord))
}

func (c *code) exitIfZero(r asm.Register) { c.add(asm.JEq.Imm(r, 0, "end")) }

// inodeReport is what the program says of an inode, in the order of its stores.
type inodeReport struct {
	Address uint64 // of the inode in the kernel: it only ever leaves this package as a comparison
	Mode    uint64 // of the file
	Kind    uint64
	Magic   uint64
	Number  uint64
	Writers int    // how often a regular file is open for writing
	Openers int    // how often a block device is open
	Device  uint64 // the number of its filesystem
	Inode   uint64
}

const inodeReportBytes = 9 * 8

// inode stores an inodeReport of the file at object, and leaves the inode in keep.
func (c *code) inode(at int16, f *fileFields, label string) {
	c.save(at+8, object, f.mode)
	c.read(keep, object, f.inode)
	c.save(at+16, keep, f.kind)
	c.add(asm.LoadMem(scratch, args, at+16, asm.DWord), asm.And.Imm(scratch, unix.S_IFMT),
		asm.JNE.Imm(scratch, unix.S_IFBLK, label))
	// The file of a block device has the inode of its node; what is open is another inode.
	c.read(keep, object, f.mapping)
	c.read(keep, keep, f.host)
	c.add(asm.StoreMem(args, at, keep, asm.DWord).WithSymbol(label))
	c.save(at+32, keep, f.number)
	c.save(at+40, keep, f.writers)
	c.read(scratch, keep, f.super)
	c.add(asm.StoreMem(args, at+56, scratch, asm.DWord))
	c.save(at+24, scratch, f.magic)
	c.add(asm.LoadMem(scratch, args, at+56, asm.DWord))
	c.save(at+56, scratch, f.device)
	c.save(at+64, keep, f.serial)
	c.add(asm.Add.Imm(keep, -f.bdevInode.offset)) // struct bdev_inode, if it is that of a block device
	c.save(at+48, keep, f.bdevOpeners)
}

// question is what the counting program answers. Its context begins with what is asked: a descriptor,
// and 1 for a loop device.
type question struct {
	Position uint64 // of the file
	Process  uint64 // of the caller, in the upper half
	File     inodeReport
	Under    inodeReport // of a loop device: what it lies on
}

const (
	atPosition = 16
	atProcess  = 24
	atFile     = 32
	atUnder    = atFile + inodeReportBytes
)

// countProgram makes the program that answers a question about a descriptor of the process that
// runs it. Without loop, what lies under loop devices is not read.
func countProgram(f *fileFields, loop *loopFields) (*ebpf.Program, error) {
	var c code
	c.add(asm.Mov.Reg(args, asm.R1),
		asm.FnGetCurrentPidTgid.Call(), asm.StoreMem(args, atProcess, asm.R0, asm.DWord),
		asm.FnGetCurrentTask.Call(), asm.Mov.Reg(object, asm.R0))
	c.read(object, object, f.files)
	c.exitIfZero(object)
	c.read(object, object, f.table)
	c.exitIfZero(object)
	c.read(scratch, object, f.most)
	c.add(asm.LoadMem(keep, args, 0, asm.DWord), asm.JGE.Reg(keep, scratch, "end"))
	c.read(object, object, f.slots)
	c.add(asm.LSh.Imm(keep, 3), asm.Add.Reg(object, keep))
	c.read(object, object, field{bytes: 8, size: asm.DWord})
	c.exitIfZero(object)
	c.save(atPosition, object, f.position)
	c.inode(atFile, f, "opened")
	if loop != nil {
		c.add(asm.LoadMem(scratch, args, 8, asm.DWord))
		c.exitIfZero(scratch)
		c.read(object, keep, f.bdevDisk)
		c.read(keep, object, f.diskPrivate) // struct loop_device
		c.exitIfZero(keep)
		c.read(scratch, keep, loop.disk)
		c.add(asm.JNE.Reg(scratch, object, "end"))
		c.read(object, keep, loop.backing)
		c.exitIfZero(object)
		c.inode(atUnder, f, "under")
	}
	c.add(asm.Mov.Imm(asm.R0, 0).WithSymbol("end"), asm.Return())
	return newSyscallProgram("crust_openers", c.ins)
}

func newSyscallProgram(name string, ins asm.Instructions) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.Syscall, Flags: unix.BPF_F_SLEEPABLE, Instructions: ins, License: license,
	})
}

// answer runs the program for a descriptor of this process.
func answer(program *ebpf.Program, fd int, loop bool) (*question, error) {
	const words = atUnder/8 + inodeReportBytes/8
	in, out := make([]uint64, words), make([]uint64, words) // the library copies these without reflection
	in[0] = uint64(fd)                                      //nolint:gosec // a descriptor
	if loop {
		in[1] = 1
	}
	if _, err := program.Run(&ebpf.RunOptions{Context: in, ContextOut: out}); err != nil {
		return nil, fmt.Errorf("ask the kernel who has a device open: %w", os.NewSyscallError("bpf", err))
	}
	return &question{
		Position: out[atPosition/8], Process: out[atProcess/8], File: reportOf(out[atFile/8:]), Under: reportOf(out[atUnder/8:]),
	}, nil
}

func reportOf(w []uint64) inodeReport {
	// Both counts have 32 bits. The kernel counts writers below 0 while it executes the file.
	writers, openers := max(0, int(int32(w[5]))), int(int32(w[6])) //nolint:gosec // 32 bits
	return inodeReport{Address: w[0], Mode: w[1], Kind: w[2], Magic: w[3], Number: w[4], Writers: writers, Openers: openers, Device: w[7], Inode: w[8]}
}

// license is what the kernel asks for before a program may read its memory.
const license = "Dual MIT/GPL"

// field is a member of a structure of the running kernel.
type field struct {
	offset int32
	bytes  int32
	size   asm.Size // of a load of the member
}

// layout finds members of the kernel's structures by its BTF, which every kernel describes itself
// with. After the first failure it finds nothing more.
type layout struct {
	spec *btf.Spec
	err  error
}

// member finds a member, which may lie in an anonymous structure or union.
func (l *layout) member(structure, name string) field {
	var found *btf.Struct
	if l.err == nil {
		l.err = l.spec.TypeByName(structure, &found)
	}
	if l.err != nil {
		return field{}
	}
	offset, kind, ok := memberOf(found.Members, name)
	if !ok || offset > math.MaxInt16 {
		l.err = fmt.Errorf("the kernel's struct %s has no member %s", structure, name)
		return field{}
	}
	f := field{offset: int32(offset), bytes: 8, size: asm.DWord}
	if size, err := btf.Sizeof(kind); err == nil && size < 8 {
		f.bytes, f.size = 4, asm.Word
		if size == 2 {
			f.bytes, f.size = 2, asm.Half
		}
	}
	return f
}

func memberOf(members []btf.Member, name string) (offset uint32, kind btf.Type, ok bool) {
	for _, m := range members {
		if m.Name == name {
			return m.Offset.Bytes(), m.Type, true
		}
		if m.Name != "" {
			continue
		}
		var inner []btf.Member
		switch of := btf.UnderlyingType(m.Type).(type) {
		case *btf.Struct:
			inner = of.Members
		case *btf.Union:
			inner = of.Members
		}
		if offset, kind, ok := memberOf(inner, name); ok {
			return m.Offset.Bytes() + offset, kind, true
		}
	}
	return 0, nil, false
}

// fileFields are the members that say which inode a file has, and who else has that.
type fileFields struct {
	mode, inode, mapping   field // struct file
	host                   field // struct address_space
	kind, number, writers  field // struct inode
	serial, super          field // struct inode
	magic, device          field // struct super_block
	bdevInode, bdevOpeners field // struct bdev_inode: its inode; its block_device's openers
	bdevDisk, diskPrivate  field // struct bdev_inode: its block_device's disk; struct gendisk
	position               field // struct file
	files, table           field // struct task_struct, struct files_struct
	most, slots            field // struct fdtable
}

func (l *layout) file() fileFields {
	f := fileFields{
		mode: l.member("file", "f_mode"), inode: l.member("file", "f_inode"), mapping: l.member("file", "f_mapping"),
		position: l.member("file", "f_pos"),
		host:     l.member("address_space", "host"),
		kind:     l.member("inode", "i_mode"), number: l.member("inode", "i_rdev"), writers: l.member("inode", "i_writecount"),
		serial: l.member("inode", "i_ino"), super: l.member("inode", "i_sb"),
		magic: l.member("super_block", "s_magic"), device: l.member("super_block", "s_dev"),
		bdevInode: l.member("bdev_inode", "vfs_inode"), bdevOpeners: l.member("block_device", "bd_openers"),
		bdevDisk: l.member("block_device", "bd_disk"), diskPrivate: l.member("gendisk", "private_data"),
		files: l.member("task_struct", "files"), table: l.member("files_struct", "fdt"),
		most: l.member("fdtable", "max_fds"), slots: l.member("fdtable", "fd"),
	}
	bdev := l.member("bdev_inode", "bdev").offset
	f.bdevOpeners.offset += bdev
	f.bdevDisk.offset += bdev
	return f
}

// loopFields are the members of struct loop_device, which may be a module's.
type loopFields struct{ disk, backing field }

func (l *layout) loop() loopFields {
	return loopFields{disk: l.member("loop_device", "lo_disk"), backing: l.member("loop_device", "lo_backing_file")}
}

// taskFields are the members that name a process.
type taskFields struct {
	process, comm, memory, program field // struct task_struct, struct mm_struct
	path, entry, entryName         field // struct file, struct path, struct dentry
	text                           field // struct qstr
	groups, group, node, nodeName  field // struct task_struct, css_set, cgroup, kernfs_node
}

func (l *layout) task() taskFields {
	return taskFields{
		process: l.member("task_struct", "tgid"), comm: l.member("task_struct", "comm"),
		memory: l.member("task_struct", "mm"), program: l.member("mm_struct", "exe_file"),
		path: l.member("file", "f_path"), entry: l.member("path", "dentry"), entryName: l.member("dentry", "d_name"),
		text:   l.member("qstr", "name"),
		groups: l.member("task_struct", "cgroups"), group: l.member("css_set", "dfl_cgrp"),
		node: l.member("cgroup", "kn"), nodeName: l.member("kernfs_node", "name"),
	}
}
