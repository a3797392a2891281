package sys

import (
	"bufio"
	"context"
	"io"
	"os"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/pace"
)

// Mount is what we need of a line of mountinfo.
type Mount struct {
	// Number is the device number, "major:minor".
	Number, Root, Point, Source string
}

// Mounts reads the mount table and returns the mounts whose device number
// "major:minor" is wanted; with nil it returns all. The table can have thousands of
// lines: read it once for all volumes.
func Mounts(ctx context.Context, wanted func(number string) bool) ([]Mount, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return parseMounts(ctx, file, wanted)
}

// parseMounts skips lines that it does not understand: a newer kernel may add some.
func parseMounts(ctx context.Context, r io.Reader, wanted func(number string) bool) ([]Mount, error) {
	var out []Mount
	lines := bufio.NewReaderSize(r, 64<<10)
	var loop pace.Loop
	for {
		loop.Step()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		line, err := lines.ReadString('\n')
		if wanted == nil || wanted(numberField(line)) {
			if entry, ok := parseMount(strings.TrimSuffix(line, "\n")); ok {
				out = append(out, entry)
			}
		}
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// numberField is the third field of a line, the device number.
func numberField(line string) string {
	for range 2 {
		_, line, _ = strings.Cut(line, " ")
	}
	number, _, _ := strings.Cut(line, " ")
	return number
}

func parseMount(line string) (Mount, bool) {
	before, after, ok := strings.Cut(line, " - ")
	if !ok {
		return Mount{}, false
	}
	head, tail := strings.Fields(before), strings.Fields(after)
	if len(head) < 6 || len(tail) < 2 {
		return Mount{}, false
	}
	return Mount{
		Number: head[2], Root: unescape(head[3]), Point: unescape(head[4]), Source: unescape(tail[1]),
	}, true
}

var escaped = LazyRegexp(`\\[0-3][0-7][0-7]`)

// unescape undoes the octal escapes that mountinfo uses for space, tab,
// newline, backslash and '#'.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return escaped().ReplaceAllStringFunc(s, func(octal string) string {
		return string([]byte{(octal[1]-'0')<<6 | (octal[2]-'0')<<3 | (octal[3] - '0')})
	})
}
