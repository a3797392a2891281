// Package vm tests crust-vm: volumes that a guest's kernel mounts, with everything real
// from the CSI call to the guest's own filesystem.
package vm
