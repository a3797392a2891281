// Package cuts replays what a machine has written to a disk as if the power had been cut at any moment: what was
// flushed is there, and of what the disk still had in its cache any part may be lost.
package cuts

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
)

const (
	// logMagic and logVersion begin a log in the form of Linux's dm-log-writes.
	logMagic   = 0x6a736677736872
	logVersion = 1
	flagFlush  = 1
)

// Entry is a write, or a flush of the disk's cache. It was logged when it was completed, before the machine knew.
type Entry struct {
	Flush        bool
	Offset, Size int64

	at int64 // where its data is in the log
}

// Log is the log of a disk that QEMU's driver blklogwrites has written.
type Log struct {
	Entries []Entry
	data    io.ReaderAt
}

// ReadLog reads which entries a log has.
func ReadLog(in io.ReaderAt) (*Log, error) {
	var super struct {
		Magic, Version, Entries uint64
		Sector                  uint32
	}
	if err := binary.Read(io.NewSectionReader(in, 0, int64(binary.Size(super))), binary.LittleEndian, &super); err != nil {
		return nil, fmt.Errorf("read the superblock: %w", err)
	}
	if super.Magic != logMagic || super.Version != logVersion || super.Sector == 0 {
		return nil, fmt.Errorf("not a log of writes: %+v", super)
	}
	l, sector := &Log{data: in}, int64(super.Sector)
	for at := sector; len(l.Entries) < int(super.Entries); { //nolint:gosec // what a test has written
		var head struct{ Sector, Sectors, Flags, Length uint64 }
		if err := binary.Read(io.NewSectionReader(in, at, int64(binary.Size(head))), binary.LittleEndian, &head); err != nil {
			return nil, fmt.Errorf("read entry %d of %d: %w", len(l.Entries), super.Entries, err)
		}
		if head.Flags&^flagFlush != 0 { // the machine's disk offers neither discards nor writes that bypass the cache
			return nil, fmt.Errorf("entry %d is of an unknown kind: %+v", len(l.Entries), head)
		}
		e := Entry{Flush: head.Flags == flagFlush, Offset: int64(head.Sector) * sector, Size: int64(head.Sectors) * sector, at: at + sector} //nolint:gosec // small
		l.Entries = append(l.Entries, e)
		at = e.at + e.Size
	}
	return l, nil
}

// Data reads what an entry has written.
func (l *Log) Data(e Entry) ([]byte, error) {
	data := make([]byte, e.Size)
	_, err := l.data.ReadAt(data, e.at)
	return data, err
}

// OpenLog reads the log in a file, which stays open.
func OpenLog(path string) (*Log, error) {
	file, err := os.Open(path) //nolint:gosec // a test's own
	if err != nil {
		return nil, err
	}
	return ReadLog(file)
}
