// Package broker tests the core on the real kernel: mounts, loop devices, other
// mount namespaces, and a process that attacks it.
package broker
