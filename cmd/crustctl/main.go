// Command crustctl is the operator's tool of crust-proxy.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/tool/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:])) }
