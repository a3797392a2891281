// Command crustctl is the operator's tool of crust-proxy. As kubectl-crust it is kubectl's plug-in.
package main

import (
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/internal/tool/cli"
	"github.com/crust-proxy/crust-proxy/internal/tool/cluster"
)

func main() {
	if filepath.Base(os.Args[0]) == "kubectl-crust" {
		os.Exit(cluster.Main(os.Args[1:]))
	}
	os.Exit(cli.Main(os.Args[1:]))
}
