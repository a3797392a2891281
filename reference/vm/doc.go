// Package vm is the reference runtime handler for virtual machines: an OCI runtime,
// crust-vm, that runs a pod in a QEMU machine of its own, and hands deferred volumes to
// the guest as disks, whose filesystems the guest's kernel mounts. The node's kernel
// never does.
//
// A sandbox is a process, `crust-vm supervise`, with QEMU and virtiofsd as its children;
// none outlives the other. A container, and each further process of it, is a process
// `crust-vm attach` on the host, which carries its streams and ends as it ends. All of
// them are found by the directory of the sandbox below the configuration's stateDir.
//
// What it lacks is in docs/crust-runc.md.
package vm
