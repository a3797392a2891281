// Package guest is the program in crust-vm's virtual machines. The kernel starts it as the
// init process, which starts the agent and reaps orphans. The agent serves the host (package
// wire): it mounts volumes with the guest's kernel and runs the containers of the pod. When
// the agent ends, init turns the machine off.
//
// The machine is the sandbox: each container has its own PID and mount namespace, and shares
// network, host name and IPC unless its spec asks for its own.
package guest
