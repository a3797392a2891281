package guest

import (
	"errors"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// capabilityNames are in the order of the kernel's numbers.
var capabilityNames = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
	NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
	SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
	WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

// capabilities are sets, a bit for each.
type capabilities struct{ bounding, effective, permitted, inheritable, ambient uint64 }

// parseCapabilities reads those of a spec. Without any, a process has none.
func parseCapabilities(from *specs.LinuxCapabilities) (c capabilities, err error) {
	if from == nil {
		return c, nil
	}
	for _, set := range []struct {
		names []string
		bits  *uint64
	}{
		{from.Bounding, &c.bounding}, {from.Effective, &c.effective}, {from.Permitted, &c.permitted},
		{from.Inheritable, &c.inheritable}, {from.Ambient, &c.ambient},
	} {
		for _, name := range set.names {
			number := slices.Index(capabilityNames, strings.TrimPrefix(name, "CAP_"))
			if number < 0 {
				return c, unsupported("the capability " + name)
			}
			*set.bits |= 1 << number
		}
	}
	return c, nil
}

// bound takes from this thread for ever what is not in the bounding set.
func (c capabilities) bound() error {
	for number := range 64 {
		if c.bounding&(1<<number) != 0 {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // the kernel knows no more
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// set gives this thread its capabilities.
func (c capabilities) set() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for i := range data {
		data[i].Effective = uint32(c.effective >> (32 * i))     //nolint:gosec // half of the bits
		data[i].Permitted = uint32(c.permitted >> (32 * i))     //nolint:gosec // half of the bits
		data[i].Inheritable = uint32(c.inheritable >> (32 * i)) //nolint:gosec // half of the bits
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return err
	}
	for number := range len(capabilityNames) {
		if c.ambient&(1<<number) != 0 {
			if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(number), 0, 0); err != nil {
				return err
			}
		}
	}
	return nil
}
