// Command crust-backup backs up and restores volumes by the changed blocks of snapshots.
package main

import (
	"os"

	"github.com/crust-proxy/crust-proxy/internal/backup/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:])) }
