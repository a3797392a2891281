// Package vm runs pods of containerd in virtual machines, by crust-vm.
package vm
