package conformance

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ProbeWord makes crust-conformance the program in the containers of a test case.
const ProbeWord = "conformance-probe"

// probeSays is before each error of the probe's own.
const probeSays = "probe: "

// Probe is that program. It prints what a workload sees.
func Probe(args []string, stdin *os.File, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		_, _ = fmt.Fprintln(stderr, probeSays+"it is for the containers of crust-conformance")
		return 2
	}
	err := probe(args[0], args[1:], stdin, stdout)
	if err != nil {
		_, _ = fmt.Fprintln(stderr, probeSays+err.Error())
		return 1
	}
	return 0
}

func probe(word string, args []string, stdin *os.File, stdout io.Writer) error {
	if word == "sleep" {
		return sleep(stdin)
	}
	if len(args) == 0 {
		return errors.New("a path is missing")
	}
	path, rest := args[0], args[1:]
	do, known := map[string]func() error{
		"write": func() error { return write(path, rest) },
		"churn": func() error { return churn(path) },
		"mkdir": func() error { return os.Mkdir(path, 0o755) }, //nolint:gosec // a directory of the test's
		"link":  func() error { return link(path, rest) },
		"swap":  func() error { return swap(path) },
		"tree":  func() error { return plantTree(path) },
		"own":   func() error { return own(path, rest) },
		"fix":   func() error { return fix(path) },
		"read":  func() error { return read(path, stdout) },
		"look":  func() error { return look(args, stdout) },
		"names": func() error { return names(path, stdout) },
		"usage": func() error { return usage(path, stdout) },
	}[word]
	if !known {
		return fmt.Errorf("%q is no word of the probe", word)
	}
	return do()
}

func link(path string, words []string) error {
	if len(words) != 1 {
		return errors.New("a path to link to is needed")
	}
	return os.Symlink(words[0], path)
}

// sleep ends at a signal, or when the other end of the standard input is closed.
func sleep(stdin *os.File) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	ended := make(chan error, 1)
	info, err := stdin.Stat()
	if err == nil && info.Mode()&os.ModeNamedPipe != 0 {
		go func() {
			_, err := io.Copy(io.Discard, stdin)
			ended <- err
		}()
	}
	select {
	case <-signals:
		return nil
	case err := <-ended:
		return err
	}
}

func write(path string, words []string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644) //nolint:gosec // a file of the test's
	if err != nil {
		return err
	}
	_, err = io.WriteString(file, strings.Join(words, ""))
	return errors.Join(err, file.Sync(), file.Close())
}

// churn writes for a while, then reads all of it and compares.
func churn(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_RDWR|os.O_SYNC, 0o644) //nolint:gosec // a file of the test's
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	var blocks int64
	for end := time.Now().Add(churnTime); time.Now().Before(end); blocks++ {
		if _, err := file.Write(blockOf(blocks)); err != nil {
			return err
		}
	}
	got := make([]byte, churnBlock)
	for n := range blocks {
		if _, err := file.ReadAt(got, n*churnBlock); err != nil {
			return err
		}
		if !bytes.Equal(got, blockOf(n)) {
			return fmt.Errorf("block %d of %d is not what was written", n, blocks)
		}
	}
	return nil
}

const (
	churnTime  = 2 * time.Second
	churnBlock = 4096
)

func blockOf(n int64) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, uint64(n)), churnBlock/8) //nolint:gosec // a small number
}

func read(path string, stdout io.Writer) error {
	raw, err := os.ReadFile(path) //nolint:gosec // a file of the test's
	if err != nil {
		return err
	}
	_, err = stdout.Write(raw)
	return err
}

func names(path string, stdout io.Writer) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	found := make([]string, 0, len(entries))
	for _, entry := range entries {
		found = append(found, entry.Name())
	}
	return json.NewEncoder(stdout).Encode(found)
}

// seen is what a workload sees of a file.
type seen struct {
	Mode uint32 `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	Dev  uint64 `json:"dev"`
	Ino  uint64 `json:"ino"`
}

func (s seen) String() string {
	return fmt.Sprintf("%d:%d mode %o", s.UID, s.GID, s.Mode&0o7777)
}

func look(paths []string, stdout io.Writer) error {
	found := make(map[string]seen)
	for _, path := range paths {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return fmt.Errorf("lstat %s: %w", path, err)
		}
		found[path] = seen{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Dev: uint64(st.Dev), Ino: st.Ino} //nolint:unconvert // narrower elsewhere
	}
	return json.NewEncoder(stdout).Encode(found)
}

// seenUsage is statfs as a workload sees it.
type seenUsage struct {
	Type   int64  `json:"type"`
	Unit   int64  `json:"unit"`
	Blocks uint64 `json:"blocks"`
	Free   uint64 `json:"free"`
	Avail  uint64 `json:"avail"`
	Files  uint64 `json:"files"`
	FFree  uint64 `json:"ffree"`
}

func usage(path string, stdout io.Writer) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return fmt.Errorf("statfs %s: %w", path, err)
	}
	//nolint:unconvert // narrower elsewhere
	return json.NewEncoder(stdout).Encode(seenUsage{
		Type: int64(fs.Type), Unit: int64(fs.Frsize), Blocks: fs.Blocks, Free: fs.Bfree, Avail: fs.Bavail, Files: fs.Files, FFree: fs.Ffree,
	})
}

// The files of a tree to which a pod's fsGroup is applied.
const (
	plainFile = "file"
	setIDFile = "setid"
	directory = "dir"
	innerFile = "dir/inner"
	linkFile  = "link"
	fixedFile = "fixed"
)

func plantTree(root string) error {
	if err := os.Mkdir(filepath.Join(root, directory), 0o700); err != nil {
		return err
	}
	for name, mode := range map[string]uint32{plainFile: 0o600, setIDFile: 0o4755, innerFile: 0o604} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.WriteFile(path, []byte(name), 0o600), unix.Chmod(path, mode)); err != nil {
			return err
		}
	}
	return nil
}

func own(path string, words []string) error {
	if len(words) != 3 {
		return errors.New("uid, gid and mode are needed")
	}
	uid, errUID := strconv.Atoi(words[0])
	gid, errGID := strconv.Atoi(words[1])
	mode, errMode := strconv.ParseUint(words[2], 8, 12)
	if err := errors.Join(errUID, errGID, errMode); err != nil {
		return err
	}
	return errors.Join(os.Lchown(path, uid, gid), unix.Chmod(path, uint32(mode)))
}

// immutable is FS_IMMUTABLE_FL of the kernel's linux/fs.h.
const immutable = 0x10

func fix(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600) //nolint:gosec // a file of the test's
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := unix.IoctlSetPointerInt(int(file.Fd()), unix.FS_IOC_SETFLAGS, immutable); err != nil {
		return fmt.Errorf("make %s immutable: %w", path, err)
	}
	return nil
}

// swapTime is how long a workload swaps.
const swapTime = 2 * time.Second

// swap exchanges a directory and a link that leads out of the volume, as fast as it can.
func swap(path string) error {
	link := path + ".link"
	if err := os.Symlink("../../../..", link); err != nil {
		return err
	}
	for end := time.Now().Add(swapTime); time.Now().Before(end); {
		if err := unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE); err != nil {
			return err
		}
	}
	return nil
}
