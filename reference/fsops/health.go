package fsops

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// extHealth reports what stopped an ext4, and the errors in its superblock, which stay
// there until e2fsck has repaired it. Without /proc and /sys nothing is known.
func extHealth(root int) []fault {
	device, err := deviceName(root)
	if err != nil {
		return nil
	}
	var wrong []fault
	options := "\n" + contents("/proc/fs/ext4/"+device+"/options") + "\n"
	if strings.Contains(options, "\nshutdown\n") {
		wrong = append(wrong, fault{abi.ReasonShutDown, "the filesystem was shut down: it reads and writes nothing until it is mounted anew"})
	}
	if strings.Contains(options, "\nemergency_ro\n") {
		wrong = append(wrong, fault{abi.ReasonReadOnly, "the kernel has stopped writing to the filesystem after an error"})
	}
	place := "/sys/fs/ext4/" + device + "/"
	n, err := strconv.ParseUint(contents(place+"errors_count"), 10, 64)
	if err != nil || n == 0 {
		return wrong
	}
	text := fmt.Sprintf("ext4 has errors on record (%d)", n)
	if where := contents(place + "last_error_func"); where != "" {
		text += ", the last one of " + where
	}
	return append(wrong, fault{abi.ReasonErrors, text + ": it needs e2fsck while it is not mounted"})
}

// contents reads a small file of /proc or /sys; a missing one counts as empty. It runs for
// each stats request: an os.File would double its cost, by registering with the poller.
func contents(path string) string {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = unix.Close(fd) }()
	var raw [4096]byte // one page, the most that the kernel returns
	n, err := unix.Read(fd, raw[:])
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw[:n]))
}

// deviceName returns the kernel's name of a filesystem's device.
func deviceName(root int) (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return "", err
	}
	dev := uint64(st.Dev) //nolint:unconvert // narrower on other architectures
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	return filepath.Base(link), err
}

// btrfsHealth reports the errors that btrfs has counted for its devices.
func btrfsHealth(root int) []fault {
	var fs btrfsFSInfo
	if _, err := ioctl(root, btrfsIocFSInfo, &fs); err != nil {
		return nil
	}
	var wrong []fault
	for id := uint64(1); id <= min(fs.MaxID, btrfsMostDevices); id++ {
		stats := btrfsDevStats{DevID: id, Items: uint64(len(btrfsCounters))}
		if _, err := ioctl(root, btrfsIocGetDevStats, &stats); err != nil {
			continue // there is no such device
		}
		for i, name := range btrfsCounters {
			if n := stats.Values[i]; n > 0 {
				wrong = append(wrong, fault{abi.ReasonErrors, fmt.Sprintf("btrfs counts %d %s of its device %d", n, name, id)})
			}
		}
	}
	return wrong
}
