package mkfs

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/internal/ground/capture"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// childDevice is the device as a program sees it: os/exec makes the first extra file descriptor 3.
	childDevice = "/proc/self/fd/3"
	maxOutput   = 64 << 10
	maxQuoted   = 1 << 10
)

type program string

// tool finds a program. One that is missing is no error until it is needed.
func (f *Formatter) tool(name string) (program, error) {
	for _, dir := range f.cfg.ToolDirs {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return program(path), nil
		}
	}
	return "", volume.Errorf(volume.Unsupported, "%s is not installed on this node: install it", name)
}

// Installed returns an error unless this node has the mkfs of a filesystem.
func Installed(fsType string) error {
	_, err := New(Config{}).tool("mkfs." + fsType)
	return err
}

// result is how a program ended, and its output.
type result capture.Output

func (r *result) failed() bool { return r.Code != 0 || r.Signal != 0 }

func (r *result) how() string {
	if r.Signal != 0 {
		return "ended by signal " + r.Signal.String()
	}
	return fmt.Sprintf("exit code %d", r.Code)
}

// text is the output of the program, errors first, for an error message.
func (r *result) text() string {
	return cmp.Or(clip(strings.TrimSpace(r.Stderr+" "+r.Stdout)), "it said nothing")
}

// clip makes text printable, one line, and not too long.
func clip(s string) string {
	s = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "?"), func(r rune) bool {
		return unicode.IsSpace(r) || !sys.IsPrintable(r)
	}), " ")
	if len(s) > maxQuoted {
		s = strings.ToValidUTF8(s[:maxQuoted], "") + " [...]"
	}
	return s
}

// run runs the program confined, with files as its descriptors from 3 on: the device, the
// lock if it may write, and what else it reads. The end of the context kills it, and the end of
// the daemon does not: it has a session of its own, and writes to memory, not to a pipe.
func (p program) run(ctx context.Context, box confine.Box, files []*os.File, args ...string) (*result, error) {
	cmd := exec.CommandContext(ctx, string(p), args...) //nolint:gosec // found by us, with arguments of ours
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	ran, err := capture.Run(cmd, box.Start, maxOutput, maxOutput)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return (*result)(&ran), nil
}
