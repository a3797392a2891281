// Command crust-conformance tries a runtime handler against docs/runtime-authors.md.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
)

func main() { os.Exit(conformance.Main(os.Args[1:])) }
