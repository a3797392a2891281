// Package initramfs builds the initramfs of a guest: its program, and the kernel modules with
// the order in which they have to be loaded.
package initramfs

// KernelArguments are the arguments of a guest's kernel. It powers off at a panic, and panics at
// an oops, after which processes might never end. It skips the check of its timer, which fails
// on a busy node, and the tests of its ciphers, which take a tenth of an emulated boot.
const KernelArguments = "console=ttyS0 loglevel=4 panic=-1 oops=panic no_timer_check cryptomgr.notests"

// MachineEnds is what process 1 writes to the console before the reason.
const MachineEnds = "crust-vm-agent: the machine ends:"

// Boot is the name of the modules that a guest loads when it boots.
const Boot = "boot"

// moduleDir has the modules. Each line of moduleList is the name of a group of modules and their
// files in the order of loading.
const (
	moduleDir  = "modules"
	moduleList = moduleDir + "/list"
)
