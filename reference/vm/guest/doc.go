// Package guest is the program in crust-vm's virtual machines. The kernel starts it as
// its first process; that one only waits for others to end, and starts the agent, which
// answers the host (package wire): it mounts volumes with the guest's kernel and runs the
// containers of the pod. When the agent ends, the machine is turned off.
//
// The machine is the sandbox: containers have namespaces of their own for processes and
// mounts, and share network, host name and IPC unless their spec asks for others.
package guest
