// Package vm runs pods of a real Kubernetes node in virtual machines, by crust-vm.
package vm
