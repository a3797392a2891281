// Package capture takes down what a program says: in memory that takes only so
// much, and not through a pipe that a child of the program could hold open.
package capture

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// New is a file for a program to write to. What is written beyond limit is
// refused to the writer.
func New(limit int64) (*os.File, error) {
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "output")
	if err := file.Truncate(limit); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Holding is a file for a program to read.
func Holding(text string) (*os.File, error) {
	fd, err := unix.MemfdCreate("input", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "input")
	if _, err := file.WriteString(text); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Text is what was written up to now; full tells that there was no room for more.
func Text(file *os.File) (said string, full bool, err error) {
	end, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return "", false, err
	}
	info, err := file.Stat()
	if err != nil {
		return "", false, err
	}
	raw := make([]byte, min(end, info.Size()))
	if _, err := file.ReadAt(raw, 0); err != nil {
		return "", false, err
	}
	return string(raw), end >= info.Size(), nil
}
