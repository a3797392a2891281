package config

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	// Line and Column count from 1. They are 0 if the value comes from a flag or is a default.
	Line, Column int
	// Key is the path of the key, such as policy.rules[0] ("name").handler; empty is the whole file.
	Key string
	// Text is one line of printable characters.
	Text string
}

// FileError is all that is wrong with a configuration, in the order of the file.
type FileError struct {
	File     string // empty if there is none, only flags
	Problems []Problem
	cause    error
}

// Error returns one line for each problem: file:line:column: key: what is wrong.
func (e *FileError) Error() string {
	lines := make([]string, 0, len(e.Problems))
	for _, p := range e.Problems {
		where := printable(e.File)
		if p.Line > 0 {
			where = fmt.Sprintf("%s:%d:%d", where, p.Line, p.Column)
		}
		parts := slices.DeleteFunc([]string{where, p.Key, p.Text}, func(part string) bool { return part == "" })
		lines = append(lines, strings.Join(parts, ": "))
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns why the file cannot be read, if that is the problem.
func (e *FileError) Unwrap() error { return e.cause }

// maxText bounds the description of a problem.
const maxText = 2048

// mostLogged bounds the records of one bad file.
const mostLogged = 20

// Log writes one record for each problem, and one with the number of those beyond the first 20.
func (e *FileError) Log(log *zap.Logger, message string) {
	for i, p := range e.Problems {
		if i == mostLogged {
			log.Error(message, zap.String("file", e.File), zap.String("problem", fmt.Sprintf("and %d more", len(e.Problems)-i)))
			return
		}
		log.Error(message, zap.String("file", e.File), zap.Int("line", p.Line), zap.Int("column", p.Column),
			zap.String("key", p.Key), zap.String("problem", p.Text))
	}
}

// err returns the problems in the order of the file, those without a line last; nil is none.
func (d *document) err(file string) error {
	if len(d.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(d.problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(uint(a.Line-1), uint(b.Line-1)), a.Column-b.Column)
	})
	return &FileError{File: file, Problems: d.problems}
}

// keyForm is how an error of Validate begins: the key's path, with a rule's name behind its index.
var keyForm = regexp.MustCompile(`^(\w[\w.]*(?:\[(?:\d+|"(?:[^"\\]|\\.)*")\](?: \("(?:[^"\\]|\\.)*"\))?[\w.]*)*): (.*)$`)

func problemsOf(err error) []Problem {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []Problem
		for _, one := range joined.Unwrap() {
			all = append(all, problemsOf(one)...)
		}
		return all
	}
	text := printable(err.Error())
	if parts := keyForm.FindStringSubmatch(text); parts != nil {
		return []Problem{{Key: parts[1], Text: parts[2]}}
	}
	return []Problem{{Text: text}}
}

// printable replaces what may not reach a terminal or a log (controls, line ends, hidden characters),
// and bounds the text.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !sys.IsPrintable(r) {
			return '\uFFFD'
		}
		return r
	}, sys.ClipTo(text, maxText))
}
