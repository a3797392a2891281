package doccheck

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

const root = "../.."

// page is one Markdown file.
type page struct {
	path string // below the root
	text string // without blocks of code
	code []block
}

// block is a fenced block of code.
type block struct{ language, text string }

// pages reads the pages at the root, and all that is below docs and deploy.
func pages(t *testing.T) []page {
	t.Helper()
	var found []page
	top := check.Value(filepath.Glob(filepath.Join(root, "*.md")))(t)
	for _, path := range top {
		found = append(found, read(t, filepath.Base(path)))
	}
	for _, dir := range []string{"docs", "deploy"} {
		check.Must(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() && strings.HasSuffix(path, ".md") {
				below, _ := filepath.Rel(root, path)
				found = append(found, read(t, below))
			}
			return err
		}))
	}
	check.Require(t, len(found) >= 15, "only %d pages were found", len(found))
	return found
}

func read(t *testing.T, path string) page {
	t.Helper()
	return parse(path, string(check.Value(os.ReadFile(filepath.Join(root, path)))(t)))
}

// parse takes the fenced blocks out of a page.
func parse(path, raw string) page {
	out := page{path: path}
	var text, code strings.Builder
	fence, language := "", ""
	for line := range strings.Lines(raw) {
		trimmed := strings.TrimSpace(line)
		switch {
		case fence == "" && strings.HasPrefix(trimmed, "```"):
			fence, language = "```", strings.TrimPrefix(trimmed, "```")
		case fence != "" && trimmed == fence:
			out.code = append(out.code, block{language, code.String()})
			code.Reset()
			fence = ""
		case fence != "":
			code.WriteString(line)
		default:
			text.WriteString(line)
		}
	}
	out.text = text.String()
	return out
}

var (
	heading    = regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`)
	inlineLink = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	notInSlug  = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// anchors are the anchors that GitHub gives a page's headings.
func (p page) anchors() []string {
	var out []string
	for _, found := range heading.FindAllStringSubmatch(p.text, -1) {
		slug := inlineLink.ReplaceAllString(found[1], "$1")
		slug = notInSlug.ReplaceAllString(strings.ToLower(slug), "")
		slug = strings.ReplaceAll(slug, " ", "-")
		for again, first := 1, slug; slices.Contains(out, slug); again++ {
			slug = first + "-" + string(rune('0'+again))
		}
		out = append(out, slug)
	}
	return out
}
