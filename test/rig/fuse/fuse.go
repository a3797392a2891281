// Package fuse is a FUSE filesystem of one file whose server may stop to answer.
package fuse

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// Inode is that of the file.
	Inode = 4711
	// Size is that of the file.
	Size = 16 << 20
	// NoAnswer has the close of a file wait for ever.
	NoAnswer = 1
)

// Server serves the filesystem of a directory until the process ends, or End is called.
type Server struct {
	// Dev is the server's descriptor. The filesystem ends when nobody has it any more.
	Dev int
	// File is the path of the file.
	File string
	// Content is what the file holds; nil is zeros.
	Content io.ReaderAt
	// Flushed is the answer when a file is closed.
	Flushed atomic.Int32
	// Silent has the server take every request, and answer none. Who waits for it cannot be killed.
	Silent atomic.Bool
	// Full is the same for writes alone.
	Full atomic.Bool
	dir  string
}

// Prepare makes what a process of any user needs in a directory that it can reach.
func Prepare(dir string) error {
	return errors.Join(os.Mkdir(dir+"/at", 0o755), //nolint:gosec // every user reaches it
		unix.Mknod(dir+"/fuse", unix.S_IFCHR, int(unix.Mkdev(10, 229))), //nolint:gosec // a small number
		os.Chmod(dir+"/fuse", 0o666))                                    //nolint:gosec // every user may use FUSE
}

// Mount mounts and serves the filesystem in a directory that was prepared. The content of its file may be nil.
func Mount(dir string, content io.ReaderAt) (*Server, error) {
	dev, err := unix.Open(dir+"/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	s := &Server{Dev: dev, Content: content, dir: dir + "/at", File: dir + "/at/file"}
	s.Flushed.Store(-int32(unix.ENOSYS))
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)
	if err := unix.Mount("fuse", s.dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID, options); err != nil {
		return nil, errors.Join(err, unix.Close(dev))
	}
	go s.serve()
	return s, nil
}

// End ends every request with an error, whoever waits for it, and unmounts.
func (s *Server) End() error { return unix.Unmount(s.dir, unix.MNT_FORCE|unix.MNT_DETACH) }

// attr is struct fuse_attr of the kernel's <linux/fuse.h>.
type attr struct {
	Inode, Size, Blocks, Atime, Mtime, Ctime                              uint64
	AtimeNS, MtimeNS, CtimeNS, Mode, Nlink, UID, GID, Rdev, Blksize, Flag uint32
}

func (s *Server) serve() {
	buf := make([]byte, 256<<10)
	for {
		n, err := unix.Read(s.Dev, buf)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
			continue // a request that was interrupted
		}
		if err != nil || n < 40 {
			return
		}
		const write = 16 // FUSE_WRITE
		if s.Silent.Load() || s.Full.Load() && binary.NativeEndian.Uint32(buf[4:]) == write {
			continue
		}
		answer, errno, none := s.answer(buf[:n])
		if none {
			continue
		}
		var out bytes.Buffer
		_ = binary.Write(&out, binary.NativeEndian, uint32(16+len(answer))) //nolint:gosec // small
		_ = binary.Write(&out, binary.NativeEndian, errno)
		out.Write(buf[8:16])
		out.Write(answer)
		_, _ = unix.Write(s.Dev, out.Bytes())
	}
}

// answer answers a request. The kernel keeps names, and nothing else.
func (s *Server) answer(request []byte) (answer []byte, errno int32, none bool) {
	root, file := attr{Inode: 1, Mode: unix.S_IFDIR | 0o755, Nlink: 2}, attr{Inode: Inode, Size: Size, Mode: unix.S_IFREG | 0o644, Nlink: 1}
	var out bytes.Buffer
	add := func(parts ...any) {
		for _, part := range parts {
			_ = binary.Write(&out, binary.NativeEndian, part)
		}
	}
	switch binary.NativeEndian.Uint32(request[4:]) {
	case 26: // FUSE_INIT
		add(uint32(7), uint32(31), uint32(0), uint32(0), uint32(0), uint32(4096), [40]byte{})
	case 1: // FUSE_LOOKUP
		add(uint64(2), uint64(0), uint64(60), uint64(0), uint64(0), file)
	case 3: // FUSE_GETATTR
		add(uint64(0), uint64(0))
		if binary.NativeEndian.Uint64(request[16:]) == 1 {
			add(root)
		} else {
			add(file)
		}
	case 14: // FUSE_OPEN
		add([16]byte{})
	case 15: // FUSE_READ
		data := make([]byte, binary.NativeEndian.Uint32(request[56:]))
		if s.Content != nil {
			_, _ = s.Content.ReadAt(data, int64(binary.NativeEndian.Uint64(request[48:]))) //nolint:gosec // within Size
		}
		add(data)
	case 25: // FUSE_FLUSH
		errno = s.Flushed.Load()
		none = errno == NoAnswer
	case 2, 36, 42: // FUSE_FORGET, FUSE_INTERRUPT and FUSE_BATCH_FORGET have no answer
		none = true
	default:
		errno = -int32(unix.ENOSYS)
	}
	return out.Bytes(), errno, none
}
