package backupcli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestBackupAndRestore(t *testing.T) {
	b := newBench(t)
	f := someBlocks()
	socket := f.serve(t, b)
	dir := t.TempDir()
	image, full, increment, restored := dir+"/image", dir+"/full", dir+"/increment", dir+"/restored"
	content := make([]byte, f.capacity)
	for _, r := range f.ranges {
		copy(content[r.ByteOffset:], bytes.Repeat([]byte("data"), int(r.SizeBytes/4)))
	}
	write := func() {
		t.Helper()
		check.Must(t, os.WriteFile(image, content, 0o600))
	}
	write()
	r := b.run("backup", "one", "--from", image, "--file", full, "--csi-socket", socket)
	check.Require(t, r.code == command.ExitOK && strings.HasPrefix(r.out, full+": 1MiB of data of a volume of 4MiB. SHA-256 ") &&
		r.err == "crust-backup: the stream broke at 12KiB: the driver stops; retrying in 250ms\n", "%+v", r)
	copy(content[8192:], "changed")
	write()
	r = b.run("backup", "two", "--from", image, "--file", increment, "--base-file", full, "--csi-socket", socket, "-o", "json")
	var got struct {
		Size     int64
		Snapshot string
		Base     struct{ Snapshot string }
		Digest   string
	}
	err := json.Unmarshal([]byte(r.out), &got)
	check.That(t, err == nil && got.Size == f.capacity && got.Snapshot == "two" && got.Base.Snapshot == "one", "%v in %+v", err, r)
	check.That(t, len(f.deltas) == 1 && f.deltas[0] == "one two", "asked for %v", f.deltas)
	r = b.run("restore", full, increment, "--check")
	check.That(t, r.code == command.ExitOK && r.out == "The files are whole: snapshot two, 4MiB.\n", "%+v", r)
	r = b.run("restore", increment, "--to", restored)
	check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, "name the full backup first"), "%+v", r)
	r = b.run("restore", full, increment, "--to", restored)
	check.That(t, r.code == command.ExitOK && r.out == restored+" has snapshot two now, 4MiB.\n", "%+v", r)
	out, err := os.ReadFile(restored)
	check.That(t, err == nil && bytes.Equal(out, content), "something else was restored: %v", err)
	left, _ := filepath.Glob(dir + "/*.part")
	check.That(t, len(left) == 0, "left: %v", left)
}

func TestBackupUsage(t *testing.T) {
	for _, args := range [][]string{
		{"backup"}, {"backup", "snap"}, {"backup", "snap", "--from", "x"}, {"backup", "snap", "--from", "x", "--file", "y", "--csi-socket", "z", "--context", "c"},
		{"restore"}, {"restore", "file"}, {"restore", "file", "--to", "x", "--check"},
	} {
		r := newBench(t).run(args...)
		check.That(t, r.code == command.ExitUsage, "%v: %+v", args, r)
	}
}
