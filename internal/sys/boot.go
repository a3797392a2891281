package sys

import (
	"os"
	"strings"
)

// BootID identifies the current boot of the machine.
func BootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw)), err
}
