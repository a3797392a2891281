// Command crust-driver is the reference CSI driver: volumes are image files.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/reference/driver"
)

func main() { os.Exit(driver.Main(os.Args[1:], os.Stdout, os.Stderr)) }
