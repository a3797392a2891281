// Command crust-backup backs up and restores volumes by the changed blocks of snapshots.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/tool/backupcli"
)

func main() { os.Exit(backupcli.Main(os.Args[1:])) }
