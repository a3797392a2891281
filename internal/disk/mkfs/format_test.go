package mkfs

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/confine"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseProbe(t *testing.T) {
	for name, c := range map[string]struct {
		in    result
		ok    bool
		blank bool
		says  string
	}{
		"nothing":                  {in: result{Code: 2}, ok: true, blank: true},
		"nothing, and a complaint": {in: result{Code: 2, Stderr: "error: /dev/x: Input/output error"}},
		"nothing, and a finding":   {in: result{Code: 2, Stdout: "TYPE=ext4\n"}},
		"well, and nothing":        {in: result{Code: 0}},
		"well, and the name only":  {in: result{Code: 0, Stdout: "DEVNAME=/dev/x\n"}},
		"a blank partition":        {in: result{Stdout: "DEVNAME=/dev/x1\nPART_ENTRY_SCHEME=gpt\nPART_ENTRY_NUMBER=1\n"}, ok: true, blank: true},
		"a partition's filesystem": {in: result{Stdout: "TYPE=ext4\nPART_ENTRY_SCHEME=gpt\n"}, ok: true, says: "ext4"},
		"no partition, and one":    {in: result{Code: 2, Stdout: "PART_ENTRY_SCHEME=gpt\n"}},
		"a filesystem":             {in: result{Stdout: "DEVNAME=/dev/x\nUUID=a=b\nTYPE=ext4\n\n"}, ok: true, says: "ext4"},
		"a partition table":        {in: result{Stdout: "PTUUID=1\nPTTYPE=gpt\n"}, ok: true, says: "a partition table (gpt)"},
		"both":                     {in: result{Stdout: "TYPE=ext4\nPTTYPE=dos"}, ok: true, says: "ext4, a partition table (dos)"},
		"a tag without a type":     {in: result{Stdout: "LABEL=x\n"}, ok: true, says: "something that blkid knows but does not name"},
		"ambivalent":               {in: result{Code: 8, Stderr: "ambivalent result"}, ok: true, says: "the signatures of more than one thing"},
		"usage":                    {in: result{Code: 4}},
		"killed":                   {in: result{Code: -1, Signal: syscall.SIGKILL}},
		"killed with a good code":  {in: result{Code: 2, Signal: syscall.SIGKILL}},
		"rubbish":                  {in: result{Stdout: "no such thing\n"}},
		"a strange key":            {in: result{Stdout: "TY PE=ext4\n"}},
	} {
		got, ok := parseProbe(&c.in)
		check.That(t, ok == c.ok, "%s: taken %v", name, ok)
		if ok {
			check.That(t, got.nothing() == c.blank, "%s: nothing found: %v", name, got.nothing())
			check.Equal(t, strings.Join(got.describe(), ", "), c.says, "%s", name)
		}
	}
}

func TestWindowsCoverEveryMarkAndStayInside(t *testing.T) {
	for _, size := range []int64{512, 4096, 5120, mib, mib + 512, 2 * mib, 2*mib + 512, 3*mib - 512, 130 * mib, 300*gib + 512} {
		grain := least
		if size%(64*kib) == 0 {
			grain = 64 * kib
		}
		all := windows(size, grain)
		seen := make(map[int64]bool)
		for _, e := range all {
			check.That(t, e.start >= 0 && e.length > 0 && e.start+e.length <= size && e.start%grain == 0, "size %d: extent %+v", size, e)
			seen[e.start] = true
		}
		check.That(t, seen[0] && all[0].length == min(size, window) && all[0].mustBeZero, "size %d: the start is not read", size)
		last := all[len(all)-1]
		check.That(t, last.start+last.length == size && last.mustBeZero, "size %d: the end is not read: %+v", size, last)
		for _, m := range marksOf(size) {
			end := m.at + int64(len(m.bytes))
			covered := m.at < 0 || end > size
			for _, e := range all {
				covered = covered || e.start <= m.at && end <= e.start+e.length
			}
			check.That(t, covered, "size %d: the mark %s at %d is not read", size, m.name, m.at)
		}
	}
}

func TestEveryMarkIsSeen(t *testing.T) {
	const size = 200 * mib
	for _, m := range marksOf(size) {
		if m.at+int64(len(m.bytes)) > size {
			continue
		}
		found := &contents{dataAt: -1}
		for _, e := range windows(size, least) {
			data := make([]byte, e.length)
			if from := m.at - e.start; from >= 0 && from < e.length {
				copy(data[from:], m.bytes)
			}
			found.scan(data, e, size)
		}
		check.That(t, !found.blank(true) && !found.blank(false) && strings.Contains(found.signatures(), m.name),
			"%s at %d: found %q", m.name, m.at, found.signatures())
	}
}

func TestBlank(t *testing.T) {
	clean := &contents{dataAt: -1}
	check.That(t, clean.blank(false) && clean.blank(true), "nothing is not blank")
	bytes := &contents{dataAt: 7}
	check.That(t, !bytes.blank(false) && bytes.blank(true), "leftovers")
	ambivalent := &contents{dataAt: -1, probe: probe{ambivalent: true}}
	check.That(t, !ambivalent.blank(true) && !ambivalent.is(""), "ambivalent")
	both := &contents{probe: probe{tags: map[string]string{"TYPE": "ext4", "PTTYPE": "dos"}}}
	check.That(t, !both.is("ext4"), "a filesystem beside a partition table")
}

func TestClip(t *testing.T) {
	check.Equal(t, clip("a\n\x1b[31mb\xff\t c"), "a [31mb? c", "clipped")
	got := clip(strings.Repeat("ä", maxQuoted))
	check.That(t, len(got) <= maxQuoted+10, "%d bytes", len(got))
}

func TestOutputIsBounded(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "loud")
	text := "#!/bin/sh\nenv >&2\nls -l /proc/self/fd/3 >&2\nyes xx | head -c 100000\nexit 7\n"
	check.Must(t, os.WriteFile(script, []byte(text), 0o700))
	device := check.Value(os.Open(dir))(t)
	defer func() { _ = device.Close() }()
	t.Setenv("SECRET", "must-not-be-seen")
	r := check.Value(program(script).run(t.Context(), confine.Box{Device: device, Memory: 1 << 30, CPU: time.Minute}, []*os.File{device}))(t)
	check.That(t, r.Code == 7 && len(r.Stdout) != 0 && len(r.Stdout) <= maxOutput, "code %d, %d bytes", r.Code, len(r.Stdout))
	check.That(t, !strings.Contains(r.Stderr, "must-not-be-seen") && strings.Contains(r.Stderr, "LC_ALL=C") && strings.Contains(r.Stderr, dir),
		"stderr: %s", r.Stderr)
}

func TestRequestsThatAreRefusedAtOnce(t *testing.T) {
	f := New(Config{LockFile: filepath.Join(t.TempDir(), "lock"), ToolDirs: []string{t.TempDir()}})
	fd := check.Value(unix.Open(t.TempDir(), unix.O_PATH|unix.O_CLOEXEC, 0))(t)
	defer func() { _ = unix.Close(fd) }()
	for _, c := range []struct {
		fsType string
		policy volume.FormatPolicy
		device int
		kind   volume.Kind
	}{
		{"ext4", "sometimes", fd, volume.Invalid},
		{"", volume.FormatHost, fd, volume.Invalid},
		{"-t ext4", volume.FormatHost, fd, volume.Invalid},
		{"ext4", volume.FormatHost, fd, volume.Invalid},
		{"ext4", volume.FormatHost, -1, volume.Internal},
	} {
		_, err := f.Prepare(context.Background(), Request{Device: c.device, Volume: "/v", Path: "/dev/x", FSType: c.fsType, Policy: c.policy})
		check.That(t, err != nil && volume.KindOf(err) == c.kind && strings.Contains(err.Error(), "/v") && strings.Contains(err.Error(), "/dev/x"),
			"%+v: %v", c, err)
	}
	_, _, err := f.maker("ext4")
	check.That(t, volume.KindOf(err) == volume.Unsupported, "a missing tool: %v", err)
	_, _, err = f.maker("ext3")
	check.That(t, volume.KindOf(err) == volume.Invalid, "ext3: %v", err)
}

func FuzzParseProbe(f *testing.F) {
	f.Add("DEVNAME=/dev/x\nTYPE=ext4\n", "", 0)
	f.Fuzz(func(t *testing.T, stdout, stderr string, code int) {
		got, ok := parseProbe(&result{Code: code, Stdout: stdout, Stderr: stderr})
		check.That(t, !ok || !got.nothing() || code == blkidNothing && (strings.Trim(stdout, "\n") == "" || strings.HasPrefix(strings.Trim(stdout, "\n"), "DEVNAME=")) && stderr == "" ||
			code == blkidFound && strings.Contains("\n"+stdout, "\nPART_ENTRY_") && !strings.Contains("\n"+stdout, "\nTYPE=") && stderr == "", "blank by %d, %q, %q", code, stdout, stderr)
	})
}

func TestMkfsOptions(t *testing.T) {
	for _, good := range [][]string{
		{"ext4"},
		{"ext4", "-i", "16384", "-I", "512", "-O", "bigalloc,^metadata_csum", "-C", "65536", "-E", "stride=16,stripe_width=64", "-m", "1"},
		{"xfs", "-i", "size=1024", "-m", "reflink=0", "-d", "agcount=4", "-l", "size=64m"},
		{"btrfs", "-n", "32768", "-m", "dup"},
	} {
		check.NoError(t, CheckOptions(good[0], good[1:]), "%q", good)
	}
	for _, bad := range [][]string{
		{"ext4", "-i"}, {"ext4", "-F", "-F"}, {"ext4", "-U", "clear"}, {"ext4", "-S", "1"}, {"ext4", "-d", "/etc"},
		{"ext4", "-i", "16384", "/dev/sda"}, {"ext4", "-J", "device=UUID=1"}, {"ext4", "-E", "offset=1048576"},
		{"ext4", "-E", "stride=16,root_owner=1:1"}, {"ext4", "-O", "-F"}, {"ext4", "-O", "extent,journal_dev"},
		{"ext4", "-i", ""},
		{"xfs", "-f", "1"}, {"xfs", "-p", "proto"}, {"xfs", "-r", "rtdev=sda"}, {"xfs", "-l", "logdev=sda"},
		{"xfs", "-d", "name=sda"}, {"xfs", "-d", "file=1"}, {"xfs", "-d", "size=1g"}, {"xfs", "-m", "uuid=0"},
		{"btrfs", "-f", "1"}, {"btrfs", "-r", "dir"}, {"btrfs", "-O", "a b"},
		{"vfat", "-n", "x"},
	} {
		check.That(t, CheckOptions(bad[0], bad[1:]) != nil, "%q is accepted", bad)
	}
}

func TestArgumentsOfMkfs(t *testing.T) {
	root := Root{Group: 2000, Mode: 0o2775}
	args, _ := ext4Args("u", []string{"-E", "stride=16", "-i", "16384"}, root)
	check.Equal(t, strings.Join(args, " "), "-q -m0 -U u -L crust-unfinished -i 16384 -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:2000,stride=16", "ext4")
	args, prototype := xfsArgs("u", nil, root)
	check.That(t, slices.Contains(args, "-p") && prototype == "/\n0 0\nd-g775 0 2000\n$\n", "xfs: %q, %q", args, prototype)
	args, prototype = xfsArgs("u", nil, Root{})
	check.That(t, !slices.Contains(args, "-p") && prototype == "", "xfs without a root: %q, %q", args, prototype)
}
