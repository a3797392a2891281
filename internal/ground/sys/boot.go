package sys

// BootID identifies the current boot of the machine.
func BootID() (string, error) { return ReadLine("/proc/sys/kernel/random/boot_id") }
