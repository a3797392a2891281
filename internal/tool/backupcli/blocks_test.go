package backupcli

import (
	"cmp"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// fakeBlocks is a driver with blocks in memory; each stream breaks after its first message.
type fakeBlocks struct {
	csi.UnimplementedSnapshotMetadataServer
	capacity int64
	ranges   []*csi.BlockMetadata
	fail     error
	deltas   []string
	secrets  []map[string]string
}

func (f *fakeBlocks) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	f.secrets = append(f.secrets, req.Secrets)
	if f.fail != nil {
		return f.fail
	}
	rest := slices.DeleteFunc(slices.Clone(f.ranges), func(b *csi.BlockMetadata) bool { return b.ByteOffset+b.SizeBytes <= req.StartingOffset })
	err := stream.Send(&csi.GetMetadataAllocatedResponse{
		BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: f.capacity, BlockMetadata: rest[:min(len(rest), 2)],
	})
	if err == nil && len(rest) > 2 {
		return status.Error(codes.Unavailable, "the driver stops")
	}
	return err
}

func (f *fakeBlocks) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	f.secrets = append(f.secrets, req.Secrets)
	f.deltas = append(f.deltas, req.BaseSnapshotId+" "+req.TargetSnapshotId)
	err := stream.Send(&csi.GetMetadataDeltaResponse{
		BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: f.capacity, BlockMetadata: f.ranges,
	})
	return cmp.Or(err, f.fail)
}

// serve serves on the socket of b, and gives its path.
func (f *fakeBlocks) serve(t *testing.T, b *bench) string {
	t.Helper()
	l := check.Value(net.Listen("unix", b.socket))(t)
	server := grpc.NewServer()
	csi.RegisterSnapshotMetadataServer(server, f)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	t.Cleanup(func() { server.Stop(); <-done })
	return b.socket
}

func someBlocks() *fakeBlocks {
	f := &fakeBlocks{capacity: 4 << 20}
	for _, r := range [][2]int64{{0, 8192}, {8192, 4096}, {1 << 20, 1 << 20}, {4<<20 - 512, 512}} {
		f.ranges = append(f.ranges, &csi.BlockMetadata{ByteOffset: r[0], SizeBytes: r[1]})
	}
	return f
}

func TestBlocksFormats(t *testing.T) {
	b := newBench(t)
	f := someBlocks()
	socket := f.serve(t, b)
	for format, want := range map[string]string{
		"raw": "0 8192\n8192 4096\n1048576 1048576\n4193792 512\n",
		"json": `{"block_metadata_type":2,"volume_size_bytes":4194304,"block_metadata":[{"byte_offset":0,"size_bytes":8192},{"byte_offset":8192,"size_bytes":4096}]}
{"block_metadata_type":2,"volume_size_bytes":4194304,"block_metadata":[{"byte_offset":1048576,"size_bytes":1048576},{"byte_offset":4193792,"size_bytes":512}]}
`,
		"qemu-img-map": `[{ "start": 0, "length": 12288, "depth": 0, "present": true, "zero": false, "data": true, "compressed": false, "offset": 0},
{ "start": 12288, "length": 1036288, "depth": 0, "present": true, "zero": true, "data": false, "compressed": false, "offset": 12288},
{ "start": 1048576, "length": 1048576, "depth": 0, "present": true, "zero": false, "data": true, "compressed": false, "offset": 1048576},
{ "start": 2097152, "length": 2096640, "depth": 0, "present": true, "zero": true, "data": false, "compressed": false, "offset": 2097152},
{ "start": 4193792, "length": 512, "depth": 0, "present": true, "zero": false, "data": true, "compressed": false, "offset": 4193792}]
`,
	} {
		r := b.run("blocks", "snap", "--csi-socket", socket, "-o", format)
		check.That(t, r.code == command.ExitOK && r.out == want, "%s: %+v", format, r)
	}
	f.ranges = f.ranges[2:3]
	r := b.run("blocks", "snap", "--base", "before", "--csi-socket", "unix://"+socket, "-o", "qemu-img-map")
	check.That(t, r.code == command.ExitOK && strings.HasPrefix(r.out, `[{ "start": 0, "length": 1048576, "depth": 1,`) && len(f.deltas) == 1 && f.deltas[0] == "before snap",
		"%v, %+v", f.deltas, r)
}

func TestBlocksPicture(t *testing.T) {
	b := newBench(t)
	f := someBlocks()
	socket := f.serve(t, b)
	r := b.run("blocks", "snap", "--csi-socket", socket)
	want := `snap: 1MiB of 4MiB (26%) have data, in 4 ranges.
      0B  ##..............................................................
  512KiB  ................................................................
    1MiB  ################################################################
  1.5MiB  ################################################################
    2MiB  ................................................................
  2.5MiB  ................................................................
    3MiB  ................................................................
  3.5MiB  ...............................................................:
A character is 8KiB: . nothing, : + * some, # all of it.
`
	check.That(t, r.code == command.ExitOK && strings.ReplaceAll(r.out, "#+", "##") == want, "%+v", r)
	// A terminal with colours, of any width, and a volume of any size.
	b.env["LANG"], b.tty = "C.UTF-8", true
	for _, capacity := range []int64{1, 4096, 1 << 20, 1<<40 + 1, 1<<63 - 1} {
		f.capacity, f.ranges = capacity, []*csi.BlockMetadata{{ByteOffset: 0, SizeBytes: capacity}}
		for _, b.width = range []int{1, 40, 100, 1000} {
			r := b.run("blocks", "snap\x1b[2J", "--csi-socket", socket, "--base", "b")
			lines := strings.Split(r.out, "\n")
			check.Require(t, r.code == command.ExitOK && len(lines) <= 8+3 && strings.Contains(r.out, "\x1b[33m█") && !strings.Contains(r.out, "\x1b[2J") && !strings.Contains(r.out, "·\x1b"),
				"%d bytes, width %d: %+v", capacity, b.width, r)
			for _, line := range lines[1 : len(lines)-2] {
				plain := strings.ReplaceAll(strings.ReplaceAll(line, "\x1b[33m", ""), "\x1b[0m", "")
				n := utf8.RuneCountInString(plain)
				check.That(t, n <= max(b.width, 26), "%d bytes, width %d: a row of %d characters", capacity, b.width, n)
			}
		}
	}
}

func TestBlocksOfNothing(t *testing.T) {
	b := newBench(t)
	f := &fakeBlocks{capacity: 1 << 30}
	socket := f.serve(t, b)
	for format, want := range map[string]string{
		"picture": "snap: 0B of 1GiB (0%) have data, in 0 ranges.\n", "raw": "",
		"json":         `{"block_metadata_type":2,"volume_size_bytes":1073741824,"block_metadata":[]}` + "\n",
		"qemu-img-map": `[{ "start": 0, "length": 1073741824, "depth": 0, "present": true, "zero": true, "data": false, "compressed": false, "offset": 0}]` + "\n",
	} {
		r := b.run("blocks", "snap", "--csi-socket", socket, "-o", format)
		check.That(t, r.code == command.ExitOK && strings.HasPrefix(r.out, want), "%s: %+v", format, r)
	}
}

func TestBlocksErrorsSayWhatToDo(t *testing.T) {
	b := newBench(t)
	f := someBlocks()
	socket := f.serve(t, b)
	for _, c := range []struct {
		fail error
		want []string
	}{
		{status.Error(codes.NotFound, "there is no snapshot \x1b[31m"), []string{"no snapshot \\x1b", "status.snapshotHandle"}},
		{status.Error(codes.Unimplemented, "unknown service csi.v1.SnapshotMetadata"), []string{"does not serve changed blocks"}},
		{status.Error(codes.InvalidArgument, "another volume"), []string{"earlier snapshot of the same volume"}},
	} {
		f.fail = c.fail
		r := b.run("blocks", "snap", "--csi-socket", socket)
		check.Equal(t, r.code, command.ExitFailure, "the exit code")
		check.Says(t, "the error", r.err, c.want...)
	}
	f.fail, f.ranges = nil, []*csi.BlockMetadata{{ByteOffset: 5, SizeBytes: 1 << 40}}
	r := b.run("blocks", "snap", "--csi-socket", socket)
	check.That(t, strings.Contains(r.err, "broke the protocol") && strings.Contains(r.err, "tell its author") && r.out == "", "%+v", r)
	r = b.run("blocks", "snap", "--csi-socket", "/nowhere")
	check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, "no CSI socket"), "%+v", r)
	for _, args := range [][]string{{}, {"a", "b"}, {"snap", "--csi-socket", socket, "-n", "shop"}, {"snap", "--base", "a", "--base-id", "b"}, {"snap", "--csi-socket", socket, "-o", "yaml"}} {
		r := b.run(append([]string{"blocks"}, args...)...)
		check.That(t, r.code == command.ExitUsage, "%v: %+v", args, r)
	}
}

// TestBlocksBeforeAnError: what a stream brought before an error is printed, in whole lines.
func TestBlocksBeforeAnError(t *testing.T) {
	b := newBench(t)
	f := &fakeBlocks{capacity: 1 << 40, fail: status.Error(codes.Internal, "a disk is broken")}
	for n := range int64(500) {
		f.ranges = append(f.ranges, &csi.BlockMetadata{ByteOffset: n << 30, SizeBytes: 1 << 20})
	}
	socket := f.serve(t, b)
	for format, want := range map[string]string{"raw": "\n535797170176 1048576\n", "json": `"byte_offset":535797170176,"size_bytes":1048576}]}` + "\n"} {
		r := b.run("blocks", "snap", "--base", "before", "--csi-socket", socket, "-o", format)
		check.That(t, r.code == command.ExitFailure && strings.HasSuffix(r.out, want), "%s: %+v", format, r)
	}
}

// TestBlocksSecrets has a driver get the secrets of a file in each call, and nobody see them.
func TestBlocksSecrets(t *testing.T) {
	b := newBench(t)
	f := someBlocks()
	socket, file := f.serve(t, b), filepath.Join(t.TempDir(), "secrets")
	run := func(text string, more ...string) result {
		t.Helper()
		f.secrets = nil
		check.Must(t, os.WriteFile(file, []byte(text), 0o600))
		return b.run(append([]string{"blocks", "snap", "--secrets-file", file}, more...)...)
	}
	for _, text := range []string{"user.name: bob\npass-word: hunter2\n", `{"user.name": "bob", "pass-word": "hunter2"}`} {
		for _, args := range [][]string{nil, {"--base", "before"}} { // the first one is resumed
			r := run(text, append(args, "--csi-socket", socket)...)
			want := map[string]string{"user.name": "bob", "pass-word": "hunter2"}
			check.That(t, r.code == command.ExitOK && len(f.secrets) != 0 && !strings.Contains(r.out+r.err, "hunter2"), "%q: %+v", text, r)
			for _, got := range f.secrets {
				check.That(t, maps.Equal(got, want), "%q: %d secrets, and others", text, len(got))
			}
		}
	}
	for _, text := range []string{
		"hunter2", "[hunter2]", "a: 1234", "hunter2: [a]", "a: hunter2\na: hunter2", "a b: hunter2", "a: {b: hunter2}", "a: 'hunter2", "a: " + strings.Repeat("x", 1<<20),
	} {
		r := run(text, "--csi-socket", socket)
		check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, file) && !strings.Contains(r.out+r.err, "hunter2") && len(f.secrets) == 0,
			"%.40q: %+v", text, r)
	}
	f.fail = status.Error(codes.Internal, "no such user, hunter2")
	r := run("password: hunter2", "--csi-socket", socket)
	check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, "no such user, [redacted]") && !strings.Contains(r.err, "hunter2"), "%+v", r)
	r = run("a: b")
	check.That(t, r.code == command.ExitUsage && strings.Contains(r.err, "--csi-socket"), "%+v", r)
	for _, args := range [][]string{{"blocks", "snap"}, {"backup", "snap", "--from", file, "--file", file + "2"}} {
		r := b.run(append(args, "--csi-socket", socket, "--secrets-file", file+".missing")...)
		check.That(t, r.code == command.ExitFailure && strings.Contains(r.err, "no such file"), "%+v", r)
	}
}
