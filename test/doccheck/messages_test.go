package doccheck

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestMessagesOfOperationsAreInTheCode: people look for what they see, word by word.
func TestMessagesOfOperationsAreInTheCode(t *testing.T) {
	_, section, found := strings.Cut(read(t, "docs/operations.md").text, "\n## When something is wrong\n")
	check.Require(t, found, "the section is gone")
	code := allCode(t) + strings.ToLower(syscall.ENOSPC.Error()) + " UNAVAILABLE" // the kernel's words, and gRPC's
	count := 0
	for _, row := range regexp.MustCompile(`(?m)^\| (.*?) \|`).FindAllStringSubmatch(section, -1) {
		for _, message := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			for part := range strings.SplitSeq(message[1], "...") {
				part = strings.Trim(part, " :")
				if len(part) < 8 {
					continue
				}
				count++
				check.That(t, strings.Contains(code, part) || strings.Contains(code, strings.ToLower(part)), "no program says %q", part)
			}
		}
	}
	check.That(t, count >= 10, "only %d messages were found", count)
}

// allCode is the text of all programs, where a message of several lines is one.
func allCode(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for _, dir := range []string{"pkg", "internal", "cmd"} {
		check.Must(t, filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			raw, err := os.ReadFile(path)
			out.Write(raw)
			return err
		}))
	}
	return regexp.MustCompile(`"\s*\+\s*"`).ReplaceAllString(out.String(), "")
}
