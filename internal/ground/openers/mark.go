package openers

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

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
