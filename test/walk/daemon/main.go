// Daemon is crust-proxy built with coverage: each SIGUSR1 writes what has run since the
// last one to GOCOVERDIR, and begins to count anew.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime/coverage"
	"syscall"

	"github.com/crust-proxy/crust-proxy/internal/daemon"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for range signals {
			if err := coverage.WriteCountersDir(os.Getenv("GOCOVERDIR")); err != nil {
				fmt.Fprintln(os.Stderr, "walk:", err)
			}
			if err := coverage.ClearCounters(); err != nil {
				fmt.Fprintln(os.Stderr, "walk:", err)
			}
		}
	}()
	os.Exit(daemon.Main(os.Args[1:], os.Stdout, os.Stderr))
}
