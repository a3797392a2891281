// Command crust-runc is runc that mounts deferred volumes in the pod's sandbox.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/runc"
)

func main() { os.Exit(runc.Main(os.Args, os.Stdout, os.Stderr)) }
