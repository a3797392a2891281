// Command crust-conformance tries a runtime handler, or a CSI driver's changed blocks.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
	"github.com/crust-proxy/crust-proxy/reference/conformance/metadata"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == metadata.Command {
		os.Exit(metadata.Main(os.Args[2:], os.Stdout, os.Stderr))
	}
	os.Exit(conformance.Main(os.Args[1:]))
}
