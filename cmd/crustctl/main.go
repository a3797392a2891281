// Command crustctl is the operator's tool of crust-proxy.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/ctl"
)

func main() { os.Exit(ctl.Main(os.Args[1:])) }
