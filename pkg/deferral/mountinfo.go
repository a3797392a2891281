package deferral

import (
	"bufio"
	"io"
	"os"
	"strings"
)

// mountEntry is the part of a mountinfo line that matters here.
type mountEntry struct {
	id, majorMinor, root, point, source string
}

func readMounts() ([]mountEntry, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return parseMounts(file)
}

// parseMounts reads mountinfo. Lines that are not understood are passed over:
// a kernel may add what we do not know.
func parseMounts(r io.Reader) ([]mountEntry, error) {
	var out []mountEntry
	lines := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := lines.ReadString('\n')
		if entry, ok := parseMount(strings.TrimSuffix(line, "\n")); ok {
			out = append(out, entry)
		}
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func parseMount(line string) (mountEntry, bool) {
	before, after, ok := strings.Cut(line, " - ")
	if !ok {
		return mountEntry{}, false
	}
	head, tail := strings.Fields(before), strings.Fields(after)
	if len(head) < 6 || len(tail) < 2 {
		return mountEntry{}, false
	}
	return mountEntry{
		id: head[0], majorMinor: head[2],
		root: unescape(head[3]), point: unescape(head[4]), source: unescape(tail[1]),
	}, true
}

// unescape undoes the octal escapes that mountinfo uses for space, tab,
// newline, backslash and '#'.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && isOctal(s[i+1:i+4]) {
			out.WriteByte((s[i+1]-'0')<<6 | (s[i+2]-'0')<<3 | (s[i+3] - '0'))
			i += 3
			continue
		}
		out.WriteByte(s[i])
	}
	return out.String()
}

func isOctal(s string) bool {
	return s[0] >= '0' && s[0] <= '3' && s[1] >= '0' && s[1] <= '7' && s[2] >= '0' && s[2] <= '7'
}

// hostMountsOf lists where this namespace has a device mounted, for error texts.
func hostMountsOf(majorMinor string) []string {
	mounts, err := readMounts()
	if err != nil {
		return nil
	}
	var points []string
	for _, m := range mounts {
		if m.majorMinor == majorMinor {
			points = append(points, m.point)
		}
	}
	return points
}
