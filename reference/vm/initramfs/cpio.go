package initramfs

import (
	"bytes"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
)

// archive is a cpio of the format newc, as the kernel unpacks it.
type archive struct {
	buf   bytes.Buffer
	inode int
}

func (a *archive) dir(name string, mode fs.FileMode) {
	a.entry(name, unix.S_IFDIR|uint32(mode), 2, nil)
}

func (a *archive) file(name string, mode fs.FileMode, data []byte) {
	a.entry(name, unix.S_IFREG|uint32(mode), 1, data)
}

// console gives the first program somewhere to write to before it has mounted anything.
func (a *archive) console() {
	a.header("dev/console", unix.S_IFCHR|0o600, 1, 0, 5, 1)
}

func (a *archive) entry(name string, mode uint32, links int, data []byte) {
	a.header(name, mode, links, len(data), 0, 0)
	a.buf.Write(data)
	a.pad()
}

func (a *archive) header(name string, mode uint32, links, size, major, minor int) {
	a.inode++
	const owner, group, time, dev = 0, 0, 0, 0
	_, _ = fmt.Fprintf(&a.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inode, mode, owner, group, links, time, size, dev, dev, major, minor, len(name)+1, 0)
	a.buf.WriteString(name + "\x00")
	a.pad()
}

func (a *archive) pad() { a.buf.Write(make([]byte, -a.buf.Len()&3)) }

// bytes ends the archive.
func (a *archive) bytes() []byte {
	a.header("TRAILER!!!", 0, 1, 0, 0, 0)
	return a.buf.Bytes()
}
