package main

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// limits is what may be. The file holds a line each:
//
//	ceiling <part> <number>            the most lines of a part of the repository
//	type <type> <methods> <files>      a type that is larger than types may be
//	commits <commit>                   messages are checked from there on
//
// What comes in is paid for by what goes. Only a feature raises a ceiling, by what it takes, in the
// commit that brings it.
type limits struct {
	ceilings map[string]int
	types    map[string][2]int
	base     string
}

func readLimits(name string) (*limits, error) {
	file, err := os.Open(name) //nolint:gosec // of the checkout
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	l := &limits{ceilings: make(map[string]int), types: make(map[string][2]int)}
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		if err := l.read(scanner.Text()); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", name, scanner.Text(), err)
		}
	}
	return l, scanner.Err()
}

func (l *limits) read(line string) error {
	var name string
	var one, two int
	switch word, rest, _ := strings.Cut(line, " "); word {
	case "", "#":
		return nil
	case "ceiling":
		_, err := fmt.Sscan(rest, &name, &one)
		l.ceilings[name] = one
		return err
	case "type":
		_, err := fmt.Sscan(rest, &name, &one, &two)
		l.types[name] = [2]int{one, two}
		return err
	case "commits":
		l.base = rest
		return nil
	}
	return fmt.Errorf("unknown word")
}

func (l *limits) check(m *module) []string {
	var found []string
	for _, part := range slices.Sorted(maps.Keys(l.ceilings)) {
		if has, most := m.lines[part], l.ceilings[part]; has > most {
			found = append(found, fmt.Sprintf("%s: %d lines, and the ceiling is %d: what comes in is paid for by what goes (go run ./hack/structure -report)", part, has, most))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.types)) {
		t, may := m.types[name], [2]int{mostMethods, mostFiles}
		exception, has := l.types[name]
		if has {
			may = exception
		}
		switch {
		case t.methods > may[0] || len(t.files) > may[1]:
			found = append(found, fmt.Sprintf("%s has %d methods in %d files, and may have %d in %d: find the second noun in it", name, t.methods, len(t.files), may[0], may[1]))
		case has && t.methods <= mostMethods && len(t.files) <= mostFiles:
			found = append(found, fmt.Sprintf("%s is small enough now: take it out of hack/structure/limits.txt", name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.types)) {
		if m.types[name] == nil {
			found = append(found, fmt.Sprintf("%s is gone: take it out of hack/structure/limits.txt", name))
		}
	}
	return found
}
