// Command crust-vm is an OCI runtime that runs a pod in a virtual machine of its own,
// whose kernel mounts the pod's deferred volumes.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/vm"
)

func main() { os.Exit(vm.Main(os.Args, os.Stdout, os.Stderr)) }
