package sys

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/pace"
)

// MountTable is the mount table of this process.
const MountTable = "/proc/self/mountinfo"

// Mounts reads a mount table and returns the mounts whose lines are wanted. The table can
// have thousands of lines, so read it once for all volumes. Only wanted lines are parsed: a
// line in a form that only a newer kernel writes does no harm otherwise.
func Mounts(ctx context.Context, table string, wanted func(line string) bool) ([]*mountinfo.Info, error) {
	file, err := os.Open(table) //nolint:gosec // the kernel's file, or a test's
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	var few bytes.Buffer
	lines := bufio.NewReaderSize(file, 64<<10)
	var loop pace.Loop
	for err == nil {
		loop.Step()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		var line string
		if line, err = lines.ReadString('\n'); wanted(line) {
			few.WriteString(line)
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", table, err)
	}
	return mountinfo.GetMountsFromReader(&few, func(*mountinfo.Info) (skip, stop bool) { loop.Step(); return false, false })
}

// DeviceOfMount returns the third field of a line of a mount table, the device number
// "major:minor".
func DeviceOfMount(line string) string {
	for range 2 {
		_, line, _ = strings.Cut(line, " ")
	}
	number, _, _ := strings.Cut(line, " ")
	return number
}
