package initramfs

import (
	"bytes"
	"fmt"
)

// archive is a cpio archive in the format newc, which the kernel unpacks.
type archive struct {
	buf   bytes.Buffer
	inode int
}

// add adds a file with its type and mode; major and minor are the number of a device.
func (a *archive) add(name string, mode uint32, major, minor int, data []byte) {
	a.inode++
	const owner, group, links, time, dev, sum = 0, 0, 1, 0, 0, 0
	_, _ = fmt.Fprintf(&a.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.inode, mode, owner, group, links, time, len(data), dev, dev, major, minor, len(name)+1, sum, name)
	a.pad()
	a.buf.Write(data)
	a.pad()
}

func (a *archive) pad() { a.buf.Write(make([]byte, -a.buf.Len()&3)) }

func (a *archive) bytes() []byte {
	a.add("TRAILER!!!", 0, 0, 0, nil)
	return a.buf.Bytes()
}
