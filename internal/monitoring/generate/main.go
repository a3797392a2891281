// Generate writes the files of deploy/monitoring, and the chart's copies of two.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/internal/monitoring"
)

func main() {
	if err := write(); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func write() error {
	files, err := monitoring.Files()
	if err != nil {
		return err
	}
	for name, content := range files {
		for _, dir := range monitoring.DirsOf(name) {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil { //nolint:gosec // everybody may read them
				return err
			}
		}
	}
	return nil
}
