// Command crust-proxy is the node-local daemon that lets a pod's sandbox mount
// its volumes. Packages and images have crustctl and kubectl-crust as links to
// it: they share most of their code, and one program is a third smaller than two.
package main

import (
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/internal/daemon"
	"github.com/crust-proxy/crust-proxy/internal/tool/cli"
	"github.com/crust-proxy/crust-proxy/internal/tool/cluster"
)

func main() {
	switch filepath.Base(os.Args[0]) {
	case "crustctl":
		os.Exit(cli.Main(os.Args[1:]))
	case "kubectl-crust":
		os.Exit(cluster.Main(os.Args[1:]))
	}
	os.Exit(daemon.Main(os.Args[1:], os.Stdout, os.Stderr))
}
