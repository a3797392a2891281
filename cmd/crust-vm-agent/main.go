// Command crust-vm-agent is the program in the virtual machines of crust-vm.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/vm/guest"
)

func main() { os.Exit(guest.Main(os.Args)) }
