// Command crust-conformance tests a runtime handler, or a CSI driver.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
	"github.com/crust-proxy/crust-proxy/reference/conformance/csidriver"
)

func main() {
	if len(os.Args) > 1 && csidriver.Has(os.Args[1]) {
		os.Exit(csidriver.Main(os.Args[1], os.Args[2:], os.Stdout, os.Stderr))
	}
	os.Exit(conformance.Main(os.Args[1:]))
}
