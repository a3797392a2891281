package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// manyFiles is how many descriptors other processes have open where that is to make no difference.
const manyFiles = 50_000

// openFiles has other processes hold so many descriptors open, until they are killed.
func openFiles(t rig.T) (holders []*rig.Process) {
	var limit unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	self := check.Value(os.Executable())(t)
	dir := check.Value(os.MkdirTemp("", "crust-files-"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	most := int(limit.Max) - 100 // of one process
	for left := manyFiles; left > 0; left -= most {
		ready := filepath.Join(dir, fmt.Sprintf("ready-%d", left))
		p := &rig.Process{
			Name: roleFiles, Program: self, Args: []string{roleFiles, strconv.Itoa(min(most, left)), ready}, LogFile: ready + ".log",
			Ready: func() error { return served(ready) },
		}
		t.Cleanup(p.Kill)
		check.Must(t, p.Start())
		holders = append(holders, p)
	}
	return holders
}

// holdFiles is the role of a process that has descriptors open: COUNT READY.
func holdFiles(args []string) error {
	count, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	for range count {
		if _, err := unix.Open(os.DevNull, unix.O_RDONLY, 0); err != nil {
			return err
		}
	}
	if err := os.WriteFile(args[1], nil, 0o600); err != nil {
		return err
	}
	select {}
}
