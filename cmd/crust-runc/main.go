// Command crust-runc is runc that mounts deferred volumes in the pod's sandbox.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/crustrunc"
)

func main() { os.Exit(crustrunc.Main(os.Args, os.Stdout, os.Stderr)) }
