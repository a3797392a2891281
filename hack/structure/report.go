package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// printReport prints the figures that docs/architecture.md shows.
func printReport(out io.Writer, m *module) error {
	var methods, wide, wideMethods, many int
	for name, t := range m.types {
		if isTest(name) {
			continue
		}
		methods += t.methods
		if len(t.files) > mostFiles {
			wide++
			wideMethods += t.methods
		}
		if t.methods > mostMethods {
			many++
		}
	}
	docs, pages, err := docLines()
	if err != nil {
		return err
	}
	sum := func(in ...string) (lines int) {
		for dir, n := range m.lines {
			for _, prefix := range in {
				if strings.HasPrefix(dir+"/", prefix+"/") {
					lines += n
				}
			}
		}
		return lines
	}
	for _, row := range []struct {
		name string
		n    any
	}{
		{"types in more than 3 files, without tests", wide},
		{"types with more than 25 methods", many},
		{"their share of all methods", fmt.Sprintf("%d %%", 100*wideMethods/max(methods, 1))},
		{"structs that embed a pointer with methods", len(m.embedded())},
		{"lines of the product (cmd, pkg, internal)", sum("cmd", "pkg", "internal")},
		{"lines of the reference parts", sum("reference")},
		{"lines of the test rigs", sum("test")},
		{"lines of docs, and pages", fmt.Sprintf("%d in %d", docs, pages)},
	} {
		if _, err := fmt.Fprintf(out, "%-45s %v\n", row.name, row.n); err != nil {
			return err
		}
	}
	return nil
}

func docLines() (lines, pages int, err error) {
	names, err := filepath.Glob("docs/*.md")
	for _, name := range names {
		raw, err := os.ReadFile(name) //nolint:gosec // of the checkout
		if err != nil {
			return 0, 0, err
		}
		lines += strings.Count(string(raw), "\n")
	}
	return lines, len(names), err
}
