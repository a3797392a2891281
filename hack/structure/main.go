// Structure checks what no linter checks: the size of types and packages, embedded
// pointers, what the core may not know, and the messages of commits. `make lint` runs
// it. With -report it prints the figures instead, and with -update it writes the lines
// of each package into the budget.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// The limits of a type.
const (
	mostMethods = 25
	mostFiles   = 3
)

func main() {
	report := flag.Bool("report", false, "print figures")
	update := flag.Bool("update", false, "write the budget anew")
	flag.Parse()
	if err := run(os.Stdout, *report, *update); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer, report, update bool) error {
	module, err := readModule(".")
	if err != nil {
		return err
	}
	limits, err := readBudget("hack/structure/budget.txt")
	if err != nil {
		return err
	}
	switch {
	case report:
		return printReport(out, module)
	case update:
		return limits.write("hack/structure/budget.txt", module)
	}
	found := append(limits.check(module), module.embedded()...)
	found = append(found, module.words()...)
	commits, err := checkCommits(limits.base)
	if err != nil {
		return err
	}
	if found = append(found, commits...); len(found) > 0 {
		return fmt.Errorf("%s", strings.Join(found, "\n"))
	}
	return nil
}
