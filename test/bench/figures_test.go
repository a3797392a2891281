package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestPartRewritesItsRowsOnly: the table is measured in slices, and keeps the rows of other
// parts, in the order of the parts, with their dates.
func TestPartRewritesItsRowsOnly(t *testing.T) {
	file := filepath.Join(t.TempDir(), "page.md")
	rows := "| gone | a | 1 |  |  | 2026-01-01 |\n| pods | b | 2 |  |  | 2026-01-01 |\n| lives | c | 3 |  |  | 2026-01-01 |\n| pods | d | 4 |  |  | 2026-01-02 |\n"
	check.Must(t, os.WriteFile(file, []byte("before\n<!-- figures: written by make bench -->\n"+rows+endMark+"\nafter\n"), 0o600))
	s := &sheet{part: "lives", slack: 1}
	s.atMost("e", "<= 2x", 3, 2, "3x")
	check.Must(t, s.write(file, "make bench", names()))
	_, table, _ := strings.Cut(string(check.Value(os.ReadFile(file))(t)), columns)
	_, table, _ = strings.Cut(table, "--- |\n")
	want := s.all[0].row() + "| pods | b | 2 |  |  | 2026-01-01 |\n| pods | d | 4 |  |  | 2026-01-02 |\n\n" + endMark + "\nafter\n"
	check.That(t, table == want, "the table is\n%s\nand not\n%s", table, want)
}
