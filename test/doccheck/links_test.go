package doccheck

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// ours is where pages of this repository are on the web.
const ours = "https://github.com/crust-proxy/crust-proxy/blob/main/"

func TestLinksLeadSomewhere(t *testing.T) {
	count := 0
	for _, p := range pages(t) {
		for _, found := range link.FindAllStringSubmatch(withoutSpans(p.text), -1) {
			check.Equal(t, follow(t, p, found[1]), "", "%s: the link %s", p.path, found[1])
			count++
		}
	}
	check.That(t, count >= 100, "only %d links were found", count)
}

// withoutSpans leaves out what is code inside of a line.
func withoutSpans(text string) string {
	return regexp.MustCompile("`[^`\n]*`").ReplaceAllString(text, "code")
}

// follow says what is wrong with a link, or nothing.
func follow(t *testing.T, from page, target string) string {
	t.Helper()
	path, isOurs := strings.CutPrefix(target, ours)
	if !isOurs {
		if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
			return "" // elsewhere
		}
		path = filepath.Join(filepath.Dir(from.path), target)
		if strings.HasPrefix(target, "#") {
			path = from.path + target
		}
	}
	path, anchor, _ := strings.Cut(path, "#")
	if _, err := os.Stat(filepath.Join(root, path)); err != nil {
		return "leads to nothing"
	}
	if anchor == "" || !strings.HasSuffix(path, ".md") {
		return ""
	}
	if !slices.Contains(read(t, path).anchors(), anchor) {
		return "names no heading of that page"
	}
	return ""
}

func TestBadLinksAreFound(t *testing.T) {
	from := page{path: "docs/front.md"}
	for target, good := range map[string]bool{
		"architecture.md": true, "../README.md": true, "architecture.md#decisions": true, "../README.md#decisions": false,
		"nowhere.md": false, "#nothing": false, "#blank-devices": true, ours + "docs/front.md#registration": true,
		ours + "docs/front.md#x": false, "https://example.com/#x": true, "../internal/front/csi": true,
	} {
		problem := follow(t, from, target)
		check.That(t, (problem == "") == good, "%s: %q", target, problem)
	}
	headings := parse("x.md", "# A `b`, c\n```\n# no\n```\n## [D](e) f-g?\n## Same\n## Same\n").anchors()
	want := []string{"a-b-c", "d-f-g", "same", "same-1"}
	check.That(t, slices.Equal(headings, want), "got %q, want %q", headings, want)
}

// TestEveryPageIsInTheIndex: README.md is the index.
func TestEveryPageIsInTheIndex(t *testing.T) {
	var listed []string
	for _, found := range link.FindAllStringSubmatch(read(t, "README.md").text, -1) {
		path, _, _ := strings.Cut(found[1], "#")
		listed = append(listed, path)
	}
	for _, p := range pages(t) {
		check.That(t, p.path == "README.md" || strings.HasPrefix(p.path, "deploy/") || slices.Contains(listed, p.path),
			"%s is not in README.md", p.path)
	}
}

// TestPagesStayFewAndShort: who has to find a fact reads at most this much. Tables and
// blocks of code may have longer lines.
func TestPagesStayFewAndShort(t *testing.T) {
	const mostPages, mostLines, longest = 15, 2800, 120
	count, lines := 0, 0
	for _, p := range pages(t) {
		for line := range strings.Lines(p.text) {
			check.That(t, len([]rune(line)) <= longest+1 || strings.HasPrefix(line, "|") || strings.HasPrefix(line, "    "),
				"%s has a line of more than %d characters: %s", p.path, longest, line)
		}
		if !strings.HasPrefix(p.path, "docs/") {
			continue
		}
		raw := check.Value(os.ReadFile(filepath.Join(root, p.path)))(t)
		count++
		lines += strings.Count(string(raw), "\n")
	}
	check.That(t, count <= mostPages && lines <= mostLines, "there are %d pages with %d lines, more than %d with %d", count, lines, mostPages, mostLines)
}
