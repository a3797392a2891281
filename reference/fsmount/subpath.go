package fsmount

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Descend opens a sub-directory of a volume, and makes what is missing of it with the mode and the group that the
// volume's root has, as kubelet does. The workload can write to the volume meanwhile.
func Descend(root int, sub string) (int, error) {
	at, err := openBelow(root, ".")
	if err != nil || sub == "" {
		return at, err
	}
	if fd, err := openBelow(root, sub); err == nil {
		_ = unix.Close(at)
		return fd, nil
	}
	var st unix.Stat_t
	err = unix.Fstat(root, &st)
	walked := ""
	for name := range strings.SplitSeq(sub, "/") {
		if err != nil {
			break
		}
		walked = strings.TrimPrefix(walked+"/"+name, "/")
		if err = makeBelow(at, name, st.Mode&0o7777); err == nil {
			sys.CloseFD(at)
			// From the root each time: a link on the way may lead elsewhere in the volume.
			at, err = openBelow(root, walked)
		}
	}
	if err != nil {
		sys.CloseFD(at)
		return -1, subError(sub, err)
	}
	return at, nil
}

// openBelow refuses a link that leads out of the volume, or to another mount. It follows others, as kubelet does.
func openBelow(root int, sub string) (int, error) {
	return sys.OpenBeneath(root, sub, unix.O_PATH|unix.O_DIRECTORY, unix.RESOLVE_NO_XDEV)
}

// makeBelow makes one directory where there is nothing. Its mode does not hang on the umask of whoever started us.
func makeBelow(at int, name string, mode uint32) error {
	if name == "" || name == "." || name == ".." {
		return fmt.Errorf("%q is not the name of a directory", name)
	}
	err := unix.Mkdirat(at, name, mode)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err != nil {
		return err
	}
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fchmod(fd, mode), unix.Close(fd))
}

func subError(sub string, err error) error {
	switch {
	case errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("the subPath %q leads to a file, and only directories of a deferred volume can be shown: %w", sub, err)
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP):
		return fmt.Errorf("the subPath %q leads out of the volume by a link: %w", sub, err)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("the subPath %q is not in the volume, which is read-only: make it while the volume can be written to: %w", sub, err)
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("the subPath %q goes by a link to nowhere in the volume: %w", sub, err)
	default:
		return fmt.Errorf("the subPath %q cannot be opened in the volume: %w", sub, err)
	}
}
