// Structure checks what no linter checks: the size of types and of the whole, embedded
// structs, what the core may not know, and the messages of commits. `make lint` runs
// it. With -report it prints the figures instead.
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
	mostMethods   = 25
	mostFiles     = 3
	mostEmbedding = 2 // others that embed it
)

func main() {
	report := flag.Bool("report", false, "print figures")
	flag.Parse()
	if err := run(os.Stdout, *report); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer, report bool) error {
	module, err := readModule(".")
	if err != nil {
		return err
	}
	if report {
		return printReport(out, module)
	}
	limits, err := readLimits("hack/structure/limits.txt")
	if err != nil {
		return err
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
