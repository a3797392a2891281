package fsops

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// NewMount creates a detached mount of a filesystem. It exists as long as its descriptor.
func NewMount(fsType, source string, options []string, attrs int) (int, error) {
	fs, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("the filesystem %s is not known to this node's kernel: load its module: %w", fsType, err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigSetString(fs, "source", source); err != nil {
		return -1, fsError(fs, "the device "+source+" is not taken", err)
	}
	for _, option := range options {
		name, value, given := strings.Cut(option, "=")
		if given {
			// kubelet quotes an SELinux label because it contains commas; mount(8) would remove the quotes.
			err = unix.FsconfigSetString(fs, name, strings.Trim(value, `"`))
		} else {
			err = unix.FsconfigSetFlag(fs, name)
		}
		if err != nil { // without the value, which can be a secret
			return -1, fsError(fs, fmt.Sprintf("the mount option %q is not taken", name), err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, fmt.Sprintf("the filesystem on %s (%s) cannot be mounted", source, fsType), err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return -1, fsError(fs, "the filesystem on "+source+" cannot be mounted", err)
	}
	return mount, nil
}

// fsError adds the kernel's messages about the failed mount, which are read from its filesystem context.
func fsError(fs int, text string, err error) error {
	var told []string
	buf := make([]byte, 512)
	for range 8 {
		n, readErr := unix.Read(fs, buf)
		if readErr != nil || n <= 2 {
			break
		}
		// A message begins with its level: e, w or i.
		told = append(told, strings.TrimSpace(string(buf[2:n])))
	}
	if len(told) > 0 {
		text += " (" + strings.Join(told, "; ") + ")"
	}
	return fmt.Errorf("%s: %w", text, err)
}
