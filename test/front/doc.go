// Package front tests the CSI front with real parts: the daemon, the reference CSI driver, loop devices, filesystems,
// and an emulation of kubelet's calls and of Kata's sandboxes; with kills of each party at each step.
package front
