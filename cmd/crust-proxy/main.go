// Command crust-proxy is the node-local daemon that lets a pod's sandbox mount
// its volumes.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/daemon"
)

func main() { os.Exit(daemon.Main(os.Args[1:], os.Stdout, os.Stderr)) }
