// Command crust-runc-agent answers about the volumes of crust-runc on a socket.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/crustagent"
)

func main() { os.Exit(crustagent.Main(os.Args, os.Stdout, os.Stderr)) }
