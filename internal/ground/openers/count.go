package openers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// counter reads the kernel's own count. Its programs are attached to nothing, and end with the process.
type counter struct {
	plain, mark *ebpf.Program

	mu sync.Mutex
	// loop is the program for loop devices, and names are those that name processes: any, or those of some programs,
	// which is not to wait for the others. They are made when they are first asked for: the loop driver may be a
	// module that is not loaded yet, and processes are rarely named.
	loop  *ebpf.Program
	names map[bool]*namer
}

// newCounter loads the program. The description of the kernel's structures takes some MiB, and is not kept.
func newCounter() (*counter, error) {
	defer btf.FlushKernelSpec()
	l, err := kernelLayout()
	if err != nil {
		return nil, err
	}
	c := &counter{names: make(map[bool]*namer)}
	fields := l.file()
	if l.err != nil {
		return nil, l.err
	}
	if c.plain, err = countProgram(&fields, nil); err != nil {
		return nil, err
	}
	if c.mark, err = markProgram(&fields); err != nil {
		return nil, err
	}
	if loop := l.loop(); l.err == nil {
		c.loop, err = countProgram(&fields, &loop)
	}
	return c, err
}

func kernelLayout() (*layout, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, fmt.Errorf("the kernel does not describe its structures (/sys/kernel/btf/vmlinux): %w", err)
	}
	return &layout{spec: spec}, nil
}

// loopProgram returns the program for loop devices, whose driver may be a module.
func (c *counter) loopProgram() (*ebpf.Program, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.loop != nil {
		return c.loop, nil
	}
	module, err := os.Open("/sys/kernel/btf/loop")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errLoopDriver, err)
	}
	defer func() { _ = module.Close() }() // read-only
	defer btf.FlushKernelSpec()
	l, err := kernelLayout()
	if err != nil {
		return nil, err
	}
	fields := l.file()
	if l.spec, err = btf.LoadSplitSpecFromReader(module, l.spec); err != nil {
		return nil, err
	}
	loop := l.loop()
	if l.err != nil {
		return nil, l.err
	}
	c.loop, err = countProgram(&fields, &loop)
	return c.loop, err
}

// count is what the kernel counts of a device or an image.
type count struct {
	// opens is how often a block device is open, or how often a regular file is open for writing.
	opens int
	// below is the same of what a loop device lies on, without the loop device itself.
	below int
	// ofLoop is how often a loop device itself has that open: it counts there.
	ofLoop int
	// under is what a loop device lies on: a block device, or an image whose filesystem numbers it as the
	// kernel does. It is zero if that is not known.
	under File
	// inodes are the addresses of the inodes that were counted, images those of regular files.
	inodes, images []uint64
	// self is the caller's process, as the first PID namespace numbers it.
	self uint32
}

const (
	// tries bounds how often a question is repeated whose answer was of another file: the
	// process's table of descriptors may move while the program reads it.
	tries = 8
	// bdevMagic is BDEVFS_MAGIC of the kernel's <linux/magic.h>.
	bdevMagic = 0x62646576
	// toWrite is FMODE_WRITE of the kernel's <linux/fs.h>.
	toWrite = 2
)

// errLoopDriver is the error for a kernel without the description of its loop driver.
var errLoopDriver = errors.New("the kernel does not describe its loop driver")

// namer returns what names processes.
func (c *counter) namer(some bool) (*namer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if names := c.names[some]; names != nil {
		return names, nil
	}
	names, err := newNamer()
	if err == nil {
		c.names[some] = names
	}
	return names, err
}

var errMoved = errors.New("the kernel's answer is of another file")

// count asks the kernel about a descriptor of this process.
func (c *counter) count(fd int, file File) (out count, err error) {
	program, loop := c.plain, IsLoop(file)
	if loop {
		if program, err = c.loopProgram(); err != nil {
			return count{}, err
		}
	}
	for range tries {
		if out, err = ask(program, fd, file, loop); !errors.Is(err, errMoved) {
			break
		}
	}
	return out, err
}

func ask(program *ebpf.Program, fd int, file File, loop bool) (count, error) {
	var mark uint64
	if !file.Block {
		// A position that no other file has tells that the answer is of this one.
		at, err := unix.Seek(fd, rand.Int64N(1<<31)+1, unix.SEEK_SET) //nolint:gosec // nobody gains by guessing it
		if err != nil {
			return count{}, err
		}
		mark = uint64(at) //nolint:gosec // not negative
	}
	q, err := answer(program, fd, loop)
	if err != nil {
		return count{}, err
	}
	out := count{self: uint32(q.Process >> 32)}
	if !file.Block {
		if q.File.Kind&unix.S_IFMT != unix.S_IFREG || q.Position != mark {
			return count{}, errMoved
		}
		out.opens, out.inodes, out.images = q.File.Writers, []uint64{q.File.Address}, []uint64{q.File.Address}
		return out, nil
	}
	if !q.File.isBlock() || q.File.Number != kernelNumber(file) {
		return count{}, errMoved
	}
	out.opens, out.inodes = q.File.Openers, []uint64{q.File.Address}
	if q.Under.Address != 0 {
		out.addUnder(&q.Under)
	}
	return out, nil
}

// addUnder adds what a loop device lies on.
func (c *count) addUnder(under *inodeReport) {
	c.inodes = append(c.inodes, under.Address)
	if under.isBlock() {
		c.ofLoop, c.below = 1, under.Openers-1
		c.under = fileOfNumber(under.Number)
		c.under.Block = true
		return
	}
	if slices.Contains(remoteMagics, under.Magic) {
		c.under = fileOfNumber(under.Device)
		c.under.Inode = under.Inode
	}
	c.images = append(c.images, under.Address)
	if under.Mode&toWrite != 0 {
		c.ofLoop = 1
	}
	c.below = under.Writers - c.ofLoop
}

func (i *inodeReport) isBlock() bool {
	return i.Kind&unix.S_IFMT == unix.S_IFBLK && i.Magic == bdevMagic
}

// remoteMagics are those of filesystems of <linux/magic.h> that ask a server for the number of an inode: FUSE, NFS,
// Ceph, SMB, CIFS and 9P. It is the number that their inodes have in the kernel's memory.
var remoteMagics = []uint64{
	unix.FUSE_SUPER_MAGIC, unix.NFS_SUPER_MAGIC, unix.CEPH_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC, unix.V9FS_MAGIC,
}

const (
	minorBits = 20
	minors    = 1<<minorBits - 1
)

// kernelNumber is the number of a block device as the kernel itself stores it.
func kernelNumber(file File) uint64 { return uint64(file.Major)<<minorBits | uint64(file.Minor) }

func fileOfNumber(number uint64) File {
	return File{Major: uint32(number >> minorBits), Minor: uint32(number & minors)} //nolint:gosec // 32 bits
}

// Mark is a device as it was open once, to ask about it when it is closed. An open for that question
// would be one more opener, and a program that is just being started would have a copy of it.
type Mark struct {
	file File
	// inode is the address of the device's inode, which the kernel keeps for as long as it has the
	// device; 0 if it is not known.
	inode uint64
	// others is how often others had it open.
	others int
}

// Mark marks the device of a descriptor that is the caller's only open of it.
func (f *Finder) Mark(fd int) Mark {
	var st unix.Stat_t
	if f.count == nil || unix.Fstat(fd, &st) != nil {
		return Mark{}
	}
	file := FileOf(&st)
	got, err := f.count.count(fd, file)
	if err != nil {
		return Mark{}
	}
	return Mark{file: file, inode: got.inodes[0], others: max(0, got.opens-1)}
}

// AwaitClosed waits at most patience until the caller's open of a marked device has ended: a copy of the
// descriptor may outlive its close. It reports whether that is known.
func (f *Finder) AwaitClosed(ctx context.Context, m Mark, patience time.Duration) (known bool) {
	if m.inode == 0 {
		return false
	}
	deadline := time.Now().Add(patience)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		opens, err := f.count.countAt(m)
		if err != nil {
			return false
		}
		if opens <= m.others || time.Now().After(deadline) || !sys.Sleep(ctx, pause) {
			return true
		}
	}
}

// markProgram makes the program that reads the inode at an address.
func markProgram(f *fileFields) (*ebpf.Program, error) {
	var c code
	c.add(asm.Mov.Reg(args, asm.R1), asm.LoadMem(keep, args, 0, asm.DWord))
	c.save(8, keep, f.number)
	c.read(scratch, keep, f.super)
	c.save(16, scratch, f.magic)
	c.add(asm.Add.Imm(keep, -f.bdevInode.offset))
	c.save(24, keep, f.bdevOpeners)
	c.add(asm.Mov.Imm(asm.R0, 0), asm.Return())
	return newSyscallProgram("crust_mark", c.ins)
}

// countAt counts the openers of a marked device. One that the kernel has not any more has none.
func (c *counter) countAt(m Mark) (int, error) {
	in, out := []uint64{m.inode, 0, 0, 0}, make([]uint64, 4)
	if _, err := c.mark.Run(&ebpf.RunOptions{Context: in, ContextOut: out}); err != nil {
		return 0, fmt.Errorf("ask the kernel who has a device open: %w", os.NewSyscallError("bpf", err))
	}
	if out[1] != kernelNumber(m.file) || out[2] != bdevMagic {
		return 0, nil
	}
	return int(int32(out[3])), nil //nolint:gosec // 32 bits
}
