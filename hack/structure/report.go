package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
)

// printReport prints the figures, and the lines of each package.
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
	for _, row := range []struct {
		name string
		n    any
	}{
		{"types in more than 3 files, without tests", wide},
		{"types with more than 25 methods", many},
		{"their share of all methods", fmt.Sprintf("%d %%", 100*wideMethods/max(methods, 1))},
		{"structs that embed a pointer with methods", len(m.embedded())},
		{"lines of the product (cmd, pkg, internal)", m.lines["product"]},
		{"lines of the reference parts", m.lines["reference"]},
		{"lines of tests and rigs", m.lines["tests"]},
	} {
		if _, err := fmt.Fprintf(out, "%-45s %v\n", row.name, row.n); err != nil {
			return err
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(m.dirs)) {
		if _, err := fmt.Fprintf(out, "%6d  %s\n", m.dirs[dir], dir); err != nil {
			return err
		}
	}
	return nil
}
