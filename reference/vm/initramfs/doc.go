// Package initramfs makes the first filesystem of a guest: its program and the kernel
// modules that this needs, in the order in which they have to be loaded.
package initramfs

// KernelArguments are those of a guest's kernel: it ends when it panics. It does not try out
// its timer, which a machine on a busy node can fail to tick in time.
const KernelArguments = "console=ttyS0 loglevel=4 panic=-1 no_timer_check"

// What a guest finds.
const (
	// Program is the guest's first program.
	Program = "init"
	// ModuleDir has the modules.
	ModuleDir = "modules"
	// ModuleList says in which order they are loaded. Its lines are a name of Modules and
	// the files in ModuleDir.
	ModuleList = ModuleDir + "/list"
	// Boot is the name of the modules that a guest loads at once.
	Boot = "boot"
)
