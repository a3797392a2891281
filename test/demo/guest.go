package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

const dataSize = 20 << 20

// written is data that a workload wrote: its checksum, and when all of it was on the disk.
type written struct {
	sum string
	at  time.Time
	err error
}

// write writes data that is new each time, a MiB after the other to the disk.
func write(dir string) (done written) {
	var seed [32]byte
	copy(seed[:], time.Now().String())
	data := make([]byte, dataSize)
	_, _ = rand.NewChaCha8(seed).Read(data) // never fails
	file, err := os.Create(dir + "/data")   //nolint:gosec // the demo's own directory
	if err != nil {
		return written{err: err}
	}
	for part := range slices.Chunk(data, 1<<20) {
		_, writeErr := file.Write(part)
		if err = errors.Join(writeErr, file.Sync()); err != nil {
			break
		}
	}
	return written{fmt.Sprintf("%x", sha256.Sum256(data)), time.Now(), errors.Join(err, file.Close())}
}

// df tells the total and the used bytes of a filesystem.
func df(dir string) (string, error) {
	var st unix.Statfs_t
	err := unix.Statfs(dir, &st)
	return fmt.Sprint(uint64(st.Bsize)*st.Blocks, " ", uint64(st.Bsize)*(st.Blocks-st.Bfree)), err //nolint:gosec // a block size is positive
}

// peek looks at a disk and tells the checksum of the data.
func peek(device string) (string, error) {
	root, err := rig.MountAside(device, "ext4", "ro")
	if err != nil {
		return "", err
	}
	defer func() { _ = root.Close() }()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/data", root.Fd()))
	return fmt.Sprintf("%x", sha256.Sum256(raw)), err
}
