package main

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// budget is what packages and types may have. The file holds a line each:
//
//	lines <package> <number>           the most lines of a package
//	type <type> <methods> <files>      a type that is larger than types may be
//	commits <commit>                   messages are checked from there on
//
// Whoever needs more raises a number in the same commit and says why in its message.
type budget struct {
	lines map[string]int
	types map[string][2]int
	base  string
}

// slack is how much a package may shrink below its budget before the budget has to
// follow, so that what was removed does not come back unseen.
const slack = 60

func readBudget(name string) (*budget, error) {
	file, err := os.Open(name) //nolint:gosec // of the checkout
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	b := &budget{lines: make(map[string]int), types: make(map[string][2]int)}
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		if err := b.read(scanner.Text()); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", name, scanner.Text(), err)
		}
	}
	return b, scanner.Err()
}

func (b *budget) read(line string) error {
	var name string
	var one, two int
	switch word, rest, _ := strings.Cut(line, " "); word {
	case "", "#":
		return nil
	case "lines":
		_, err := fmt.Sscan(rest, &name, &one)
		b.lines[name] = one
		return err
	case "type":
		_, err := fmt.Sscan(rest, &name, &one, &two)
		b.types[name] = [2]int{one, two}
		return err
	case "commits":
		b.base = rest
		return nil
	}
	return fmt.Errorf("unknown word")
}

func (b *budget) check(m *module) []string {
	var found []string
	for _, dir := range slices.Sorted(maps.Keys(m.lines)) {
		has, most := m.lines[dir], b.lines[dir]
		switch {
		case has > most:
			found = append(found, fmt.Sprintf("%s has %d lines, its budget is %d: remove some, or raise it in hack/structure/budget.txt and say why", dir, has, most))
		case has+slack < most:
			found = append(found, fmt.Sprintf("%s has only %d lines: lower its budget of %d in hack/structure/budget.txt", dir, has, most))
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(b.lines)) {
		if m.lines[dir] == 0 {
			found = append(found, fmt.Sprintf("%s is gone: take it out of hack/structure/budget.txt", dir))
		}
	}
	return append(found, b.checkTypes(m)...)
}

func (b *budget) checkTypes(m *module) []string {
	var found []string
	for _, name := range slices.Sorted(maps.Keys(m.types)) {
		t, may := m.types[name], [2]int{mostMethods, mostFiles}
		exception, has := b.types[name]
		if has {
			may = exception
		}
		switch {
		case t.methods > may[0] || len(t.files) > may[1]:
			found = append(found, fmt.Sprintf("%s has %d methods in %d files, and may have %d in %d: find the second noun in it", name, t.methods, len(t.files), may[0], may[1]))
		case has && t.methods <= mostMethods && len(t.files) <= mostFiles:
			found = append(found, fmt.Sprintf("%s is small enough now: take it out of hack/structure/budget.txt", name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(b.types)) {
		if m.types[name] == nil {
			found = append(found, fmt.Sprintf("%s is gone: take it out of hack/structure/budget.txt", name))
		}
	}
	return found
}

// write sets the budget to what is there.
func (b *budget) write(name string, m *module) error {
	var text strings.Builder
	text.WriteString("# What packages and types may have: see budget.go. `make budget` writes it anew.\n")
	fmt.Fprintf(&text, "commits %s\n", b.base)
	for _, dir := range slices.Sorted(maps.Keys(m.lines)) {
		fmt.Fprintf(&text, "lines %s %d\n", dir, m.lines[dir])
	}
	for _, key := range slices.Sorted(maps.Keys(m.types)) {
		if t := m.types[key]; t.methods > mostMethods || len(t.files) > mostFiles {
			fmt.Fprintf(&text, "type %s %d %d\n", key, t.methods, len(t.files))
		}
	}
	return os.WriteFile(name, []byte(text.String()), 0o600)
}
