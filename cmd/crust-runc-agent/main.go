// Command crust-runc-agent answers about the volumes of crust-runc on a socket.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/runc/agent"
)

func main() { os.Exit(agent.Main(os.Args, os.Stdout, os.Stderr)) }
