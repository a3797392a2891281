// Package initramfs makes the first filesystem of a guest: its program and the kernel
// modules that this needs, in the order in which they have to be loaded.
package initramfs

// KernelArguments are those of a guest's kernel: it ends when it panics, and panics where it
// would go on with a process that cannot end. It does not try out its timer, which a machine
// on a busy node can fail to tick in time, nor its ciphers, which takes a tenth of an
// emulated boot.
const KernelArguments = "console=ttyS0 loglevel=4 panic=-1 oops=panic no_timer_check cryptomgr.notests"

// Boot is the name of the modules that a guest loads at once.
const Boot = "boot"

// The guest's first program is init, as the kernel expects. It finds modules in a directory,
// and there a list: its lines are a name of Modules and the files in the order of loading.
const (
	moduleDir  = "modules"
	moduleList = moduleDir + "/list"
)
