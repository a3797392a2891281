// Command crust-proxy is the node-local daemon that lets a pod's sandbox mount
// its volumes. Packages and images have crustctl as a link to it: the two share
// most of their code, and one program is a third smaller.
package main

import (
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/internal/daemon"
	"github.com/crust-proxy/crust-proxy/internal/tool/cli"
)

func main() {
	switch filepath.Base(os.Args[0]) {
	case "crustctl", "kubectl-crust":
		os.Exit(cli.Main(os.Args[1:]))
	}
	os.Exit(daemon.Main(os.Args[1:], os.Stdout, os.Stderr))
}
