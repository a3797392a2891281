// Package node tests the packages on a whole Debian node: a virtual machine in which systemd is process 1,
// control groups are of version 2, and nothing is kept from root.
package node

// Port is the virtio-serial port by which the host runs commands in the machine.
const Port = "node"

// Command is one that the host wants to run.
type Command struct {
	ID   int
	Args []string
}

// Result is what became of a command.
type Result struct {
	ID     int
	Output string
	Code   int
}
