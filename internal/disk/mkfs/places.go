package mkfs

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
)

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
	gib = int64(1) << 30
	// window is what is read at the start and at the end.
	window = mib
	// grain is how reads are aligned: no smaller than any device's sector.
	grain = 4 * kib
)

// mark is a signature that we look for besides blkid.
type mark struct {
	name  string
	at    int64
	bytes []byte
}

func (m mark) within(data []byte, start int64) bool {
	from := m.at - start
	return from >= 0 && from < int64(len(data)) && bytes.HasPrefix(data[from:], m.bytes)
}

// The marks of the filesystems that can be made.
var (
	extMark   = mark{"ext2, ext3 or ext4", kib + 56, []byte{0x53, 0xef}}
	xfsMark   = mark{"xfs", 0, []byte("XFSB")}
	btrfsMark = mark{"btrfs", 64*kib + 64, []byte("_BHRfS_M")}
)

// marksOf are the signatures of what is most often found on a volume, and the copies from which a
// filesystem can be restored whose first blocks were overwritten.
func marksOf(size int64) []mark {
	md, gpt := []byte{0xfc, 0x4e, 0x2b, 0xa9}, []byte("EFI PART")
	btrfs := btrfsMark.bytes
	marks := []mark{
		extMark, xfsMark, btrfsMark,
		{"a btrfs whose mkfs was cut off", 64*kib + 64, []byte("!BHRfS_M")},
		{"a copy of a btrfs superblock", 64*mib + 64, btrfs},
		{"a copy of a btrfs superblock", 256*gib + 64, btrfs},
		{"crypto_LUKS", 0, []byte("LUKS\xba\xbe")},
		{"a partition table (GPT)", 512, gpt},
		{"a partition table (GPT)", grain, gpt},
		{"a partition table (GPT)", size - 512, gpt},
		{"a partition table (GPT)", size - grain, gpt},
		{"a boot sector or partition table (MBR)", 510, []byte{0x55, 0xaa}},
		{"a RAID member (md)", 0, md},
		{"a RAID member (md)", grain, md},
		{"a RAID member (md)", (size - 8*kib) &^ (grain - 1), md},
		{"a RAID member (md)", size&^(64*kib-1) - 64*kib, md},
	}
	for sector := range int64(4) {
		marks = append(marks, mark{"LVM2_member", sector * 512, []byte("LABELONE")})
	}
	for _, page := range []int64{4 * kib, 8 * kib, 16 * kib, 64 * kib} {
		marks = append(marks, mark{"swap", page - 10, []byte("SWAPSPACE2")}, mark{"swap", page - 10, []byte("SWAP-SPACE")})
	}
	for at := 16 * kib; at <= 4*mib; at *= 2 {
		marks = append(marks, mark{"a copy of a LUKS header", at, []byte("SKUL\xba\xbe")})
	}
	// The first copies of an ext superblock lie in block group 1, for the three common block sizes. The magic number
	// has only two bytes, so the two possible states and three ways to treat errors that follow it must match too.
	const extCopy = "a copy of an ext2, ext3 or ext4 superblock"
	for _, start := range []int64{8193 * kib, 16384 * 2 * kib, 32768 * 4 * kib} {
		for _, state := range []byte{0, 1} {
			for onError := byte(1); onError <= 3; onError++ {
				marks = append(marks, mark{extCopy, start + 56, []byte{0x53, 0xef, state, 0, onError, 0}})
			}
		}
	}
	return marks
}

// extent is a part of the device that is read.
type extent struct {
	start, length int64
	mustBeZero    bool
}

// windows are the parts to read: both ends, and around each mark beyond them.
func windows(size int64) []extent {
	tail := max(window, (size-window)&^(grain-1))
	out := []extent{{0, min(size, window), true}}
	for _, m := range marksOf(size) {
		e := extent{m.at &^ (grain - 1), grain, false}
		if m.at >= window && m.at+int64(len(m.bytes)) <= tail && !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	for start := tail; start < size; start += window {
		out = append(out, extent{start, min(window, size-start), true})
	}
	return out
}

// read reads the extent into an aligned buffer that is large enough. Less than the whole of it is an error.
func (e extent) read(file *os.File, buffer []byte, size int64) ([]byte, error) {
	want := min(e.length, size-e.start)
	// The end of a device need not be a multiple of our grain; its end ends the read.
	ask := min((want+grain-1)&^(grain-1), int64(len(buffer)))
	n, err := file.ReadAt(buffer[:ask], e.start)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if int64(n) < want {
		return nil, io.ErrUnexpectedEOF
	}
	return buffer[:want], nil
}
