package backup_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/backup"
	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const mib = 1 << 20

// named is a server that names ranges; cut is after how many the caller goes away.
func named(capacity int64, ranges []blocks.Range, cut int, cancel func()) *blocks.Reader {
	return &blocks.Reader{Source: func(_ context.Context, from int64) (blocks.Stream, error) {
		at := 0
		return func() (blocks.Message, error) {
			for ; at < len(ranges); at++ {
				if at == cut {
					cancel()
				}
				if ranges[at].End() > from {
					at++
					return blocks.Message{Type: blocks.VariableLength, Capacity: capacity, Ranges: ranges[at-1 : at]}, nil
				}
			}
			return blocks.Message{}, io.EOF
		}, nil
	}}
}

// bench is a volume in memory, and a directory with its backups.
type bench struct {
	t      *testing.T
	dir    string
	random *rand.Rand
	volume []byte
	noise  []byte // what is written; some zeros are left in between
}

func newBench(t *testing.T, size int) *bench {
	t.Helper()
	seed := rig.Seed(t)
	r := &bench{t: t, dir: t.TempDir(), random: rand.New(rand.NewPCG(seed, seed)), volume: make([]byte, size), noise: make([]byte, 16<<10)}
	for i := range r.noise {
		r.noise[i] = byte(r.random.Uint32())
	}
	return r
}

func (r *bench) path(name string) string { return filepath.Join(r.dir, name) }

// change writes to the volume, sometimes zeros, and gives the ranges.
func (r *bench) change(times int) (ranges []blocks.Range) {
	next := 0
	for range times {
		left := len(r.volume) - next
		if left < 2 {
			break
		}
		at := next + r.random.IntN(left/2)
		n := 1 + r.random.IntN(min(len(r.volume)-at, 3*mib))
		part := r.volume[at : at+n]
		clear(part)
		if r.random.IntN(3) > 0 {
			for i := 0; i < n; i += len(r.noise) {
				copy(part[i:], r.noise[r.random.IntN(len(r.noise)):])
			}
		}
		ranges = append(ranges, blocks.Range{Offset: int64(at), Size: int64(n)})
		next = at + n
	}
	return ranges
}

// image writes the volume into a file.
func (r *bench) image() string {
	r.t.Helper()
	check.Must(r.t, os.WriteFile(r.path("image"), r.volume, 0o600))
	return r.path("image")
}

func (r *bench) job(snapshot, base string, ranges []blocks.Range) *backup.Backup {
	r.t.Helper()
	b := &backup.Backup{
		Snapshot: snapshot, From: r.image(), File: r.path(snapshot), Blocks: named(int64(len(r.volume)), ranges, -1, nil),
	}
	if base != "" {
		b.Base = check.Value(backup.ReadBase(r.path(base)))(r.t)
	}
	return b
}

func (r *bench) backUp(snapshot, base string, ranges []blocks.Range) *backup.Result {
	r.t.Helper()
	return check.Value(r.job(snapshot, base, ranges).Run(r.t.Context()))(r.t)
}

func (r *bench) restore(target string, names ...string) error {
	r.t.Helper()
	paths := make([]string, len(names))
	for i, name := range names {
		paths[i] = r.path(name)
	}
	return check.Err(backup.Restore(r.t.Context(), paths, target))
}

func (r *bench) wantRestored(names ...string) {
	r.t.Helper()
	check.Must(r.t, r.restore(r.path("restored"), names...))
	got := check.Value(os.ReadFile(r.path("restored")))(r.t)
	check.Require(r.t, bytes.Equal(got, r.volume), "%v restore something else", names)
	check.Must(r.t, os.Remove(r.path("restored")))
}

// three makes a full backup and two increments; the volume grows in between.
func (r *bench) three() {
	r.t.Helper()
	r.backUp("full", "", r.change(5))
	r.backUp("one", "full", r.change(3))
	was := len(r.volume)
	r.volume = append(r.volume, make([]byte, 3*mib+512)...)
	for at := was + mib; at < was+2*mib; at++ {
		r.volume[at] = 1
	}
	r.backUp("two", "one", []blocks.Range{{Offset: int64(was), Size: 3*mib + 512}})
}

func TestRestoreEqualsTheSource(t *testing.T) {
	for range 5 {
		r := newBench(t, 8*mib+3)
		r.three()
		r.wantRestored("full", "one", "two")
	}
}

func TestHolesAreKept(t *testing.T) {
	r := newBench(t, 64*mib)
	r.volume[40*mib] = 1
	// All of it is named, also what is zero.
	check.Equal(t, r.backUp("full", "", []blocks.Range{{Offset: 0, Size: 64 * mib}}).Data, mib, "bytes of data")
	check.Must(r.t, r.restore(r.path("restored"), "full"))
	for name, most := range map[string]int64{"full": 2 * mib, "restored": 2 * mib} {
		var info syscall.Stat_t
		check.Must(r.t, syscall.Stat(r.path(name), &info))
		check.That(t, info.Blocks*512 <= most, "%s takes %d bytes", name, info.Blocks*512)
	}
}

func TestNothingIsNamed(t *testing.T) {
	r := newBench(t, 2*mib)
	r.change(3)
	r.volume[2*mib-1] = 1
	r.backUp("full", "", nil)
	r.backUp("one", "full", nil)
	r.wantRestored("full", "one")
	r.volume = append(r.volume, make([]byte, mib)...)
	r.volume[3*mib-1] = 1
	r.backUp("two", "one", nil)
	r.wantRestored("full", "one", "two")
	check.Must(r.t, os.Rename(r.path("full"), r.path("again.part"))) // all but its end is there
	check.Must(r.t, os.Truncate(r.path("again.part"), mib+200))
	r.volume = r.volume[:2*mib]
	job := r.job("full", "", nil)
	job.File = r.path("again")
	check.Must(r.t, check.Err(job.Run(t.Context())))
	r.wantRestored("again")
	whole := r.backUp("inc", "again", r.change(1))
	check.Must(r.t, os.Rename(r.path("inc"), r.path("resumed.part")))
	check.Must(r.t, os.Truncate(r.path("resumed.part"), check.Value(os.Stat(r.path("resumed.part")))(t).Size()-1))
	job = r.job("inc", "again", nil) // nothing has changed from there on
	job.File = r.path("resumed")
	check.Equal(t, check.Value(job.Run(t.Context()))(t).Data, whole.Data, "data of an increment that goes on")
}

// TestIncrementsFit: what is wrong with the size of an increment shows when it is made, and
// not when all of them are to be restored.
func TestIncrementsFit(t *testing.T) {
	r := newBench(t, mib)
	r.backUp("full", "", r.change(3))
	from := func(name string, size int, base string) error {
		job := r.job(name, base, nil)
		job.From = r.path("device")
		check.Must(r.t, os.WriteFile(job.From, make([]byte, size), 0o600))
		return check.Err(job.Run(t.Context()))
	}
	check.Fails(t, from("small", mib/2, "full"), "is it the right one") // nothing is named, and the device is too small
	check.Fails(t, from("nothing", 0, ""), "device is empty")
	check.Must(r.t, from("one", 2*mib, "full")) // nothing is named
	r.backUp("two", "one", r.change(1))
	r.wantRestored("full", "one", "two")
	whole := r.volume
	r.volume = whole[:mib/2]
	check.Fails(t, check.Err(r.job("three", "two", []blocks.Range{{Offset: 0, Size: 512}}).Run(t.Context())), "volumes do not shrink")
}

// TestResume cuts a backup off in many ways; the next one goes on with what is there.
func TestResume(t *testing.T) {
	r := newBench(t, 8*mib)
	ranges := r.change(8)
	r.volume[ranges[0].Offset] = 1 // zeros are written only when something follows
	r.backUp("whole", "", ranges)
	whole := check.Value(os.ReadFile(r.path("whole")))(t)
	ctx, cancel := context.WithCancel(t.Context())
	job := r.job("snap", "", ranges)
	job.Snapshot, job.Blocks = "whole", named(8*mib, ranges, len(ranges)/2, cancel)
	check.Is(t, check.Err(job.Run(ctx)), context.Canceled)
	check.Fails(t, check.Err(os.Stat(r.path("snap")))) // or the file has its name already
	job.Blocks = named(8*mib, ranges, -1, nil)
	got := check.Value(job.Run(t.Context()))(r.t)
	again := check.Value(os.ReadFile(r.path("snap")))(t)
	check.That(t, bytes.Equal(again, whole) && got.Resumed != 0, "resumed at %d", got.Resumed)
	for range 25 {
		check.Must(r.t, os.Remove(r.path("snap")))
		torn := bytes.Clone(whole[:r.random.IntN(len(whole)+1)])
		if len(torn) > 12 && r.random.IntN(2) == 0 {
			clear(torn[len(torn)-12:]) // as after a power failure
		}
		check.Must(r.t, os.WriteFile(r.path("snap.part"), torn, 0o600))
		check.Must(r.t, check.Err(job.Run(t.Context())))
		again := check.Value(os.ReadFile(r.path("snap")))(t)
		check.Require(t, bytes.Equal(again, whole), "not the same after %d bytes", len(torn))
	}
}

// TestResumeFromAnotherDisk: what the first --from had, also its zeros, must be in that of the second.
func TestResumeFromAnotherDisk(t *testing.T) {
	r := newBench(t, 4*mib)
	r.volume[3*mib] = 1
	ranges := []blocks.Range{{Offset: 0, Size: 2 * mib}, {Offset: 3 * mib, Size: mib}}
	r.backUp("snap", "", ranges)
	check.Must(r.t, os.Rename(r.path("snap"), r.path("snap.part")))
	for _, at := range []int{2*mib - 1, 3 * mib} {
		r.volume[at]++
		check.Fails(t, check.Err(r.job("snap", "", ranges).Run(t.Context())), "begun with other data", fmt.Sprintf("at byte %d:", at/mib*mib))
		r.volume[at]--
	}
}

// TestResumeAtTheEnd: a driver may refuse to begin where nothing is left.
func TestResumeAtTheEnd(t *testing.T) {
	r := newBench(t, 2*mib)
	r.volume[2*mib-1] = 1
	all := []blocks.Range{{Offset: 0, Size: 2 * mib}}
	r.backUp("snap", "", all)
	whole := check.Value(os.ReadFile(r.path("snap")))(t)
	job := r.job("snap", "", nil)
	job.Blocks = &blocks.Reader{Source: func(_ context.Context, from int64) (blocks.Stream, error) {
		return nil, fmt.Errorf("asked from byte %d on", from)
	}}
	check.Must(r.t, os.Remove(r.path("snap")))
	check.Must(r.t, os.WriteFile(r.path("snap.part"), whole[:len(whole)-1], 0o600))
	check.Must(r.t, check.Err(job.Run(t.Context())))
	check.That(t, bytes.Equal(check.Value(os.ReadFile(r.path("snap")))(t), whole), "not the same")
}

func TestBackupRefuses(t *testing.T) {
	r := newBench(t, 4*mib)
	ranges := r.change(3)
	r.volume[ranges[0].Offset] = 1
	r.backUp("full", "", ranges)
	for text, change := range map[string]func(*backup.Backup){
		"exists already": func(b *backup.Backup) { b.File = r.path("full") },
		"is it the right one": func(b *backup.Backup) {
			b.From = r.path("small")
			check.Must(r.t, os.WriteFile(b.From, make([]byte, mib), 0o600))
		},
		"unfinished backup of another": func(b *backup.Backup) {
			check.Must(r.t, os.WriteFile(b.File+".part", check.Value(os.ReadFile(r.path("full")))(t), 0o600))
		},
		"snap.part: it exists": func(b *backup.Backup) {
			check.Must(r.t, os.WriteFile(b.File+".part", []byte("my dissertation"), 0o600))
		},
		"part: it exists": func(b *backup.Backup) {
			disk := append(make([]byte, 32<<10), "\x01CD001"...) // begins with zeros, as images of disks do
			check.Must(r.t, os.WriteFile(b.File+".part", disk, 0o600))
		},
		"another process": func(b *backup.Backup) {
			file := check.Value(os.Create(b.File + ".part"))(r.t)
			t.Cleanup(func() { _ = file.Close() })
			check.Must(r.t, syscall.Flock(int(file.Fd()), syscall.LOCK_EX))
		},
	} {
		job := r.job("snap", "", ranges)
		change(job)
		check.Fails(t, check.Err(job.Run(t.Context())), text)
		_ = os.Remove(job.File + ".part")
	}
	check.Must(r.t, os.WriteFile(r.path("torn"), []byte("CRUSTBK1"), 0o600))
	check.Fails(t, check.Err(backup.ReadBase(r.path("torn"))), "not completed")
}

// TestRestoreResumes restores to what restores that were killed have left.
func TestRestoreResumes(t *testing.T) {
	r := newBench(t, 8*mib)
	ranges := r.change(8)
	r.volume[ranges[0].Offset] = 1
	made := r.backUp("full", "", ranges)
	old := bytes.Clone(r.volume)
	r.volume[ranges[0].Offset] = 2
	r.backUp("one", "full", []blocks.Range{{Offset: ranges[0].Offset, Size: 1}})
	restore := func(left []byte) int64 {
		t.Helper()
		check.Must(r.t, os.WriteFile(r.path("restored.part"), left, 0o600))
		got := check.Value(backup.Restore(t.Context(), []string{r.path("full"), r.path("one")}, r.path("restored")))(r.t)
		is := check.Value(os.ReadFile(r.path("restored")))(t)
		check.Require(t, bytes.Equal(is, r.volume), "something else was restored to %d bytes", len(left))
		check.Must(r.t, os.Remove(r.path("restored")))
		return got.Resumed
	}
	check.Equal(t, restore(nil), 0, "bytes that a new file had already")
	n := restore(old)
	check.That(t, n == made.Data, "%d of %d bytes were not written again", n, made.Data)
	restore(r.volume)
	for range 25 {
		torn := bytes.Clone(r.volume)
		at := r.random.IntN(len(r.volume))
		clear(torn[at:min(len(torn), at+4096)]) // a write that a power failure has lost
		copy(torn[r.random.IntN(len(torn)):], r.noise)
		restore(torn)
	}
}

// TestRestoreLeavesAForeignPart: what no restore of this volume has left stays as it is.
func TestRestoreLeavesAForeignPart(t *testing.T) {
	r := newBench(t, 4*mib)
	r.three()
	for _, has := range []string{"my dissertation", strings.Repeat("x", 4*mib+1)} {
		check.Must(r.t, os.WriteFile(r.path("restored.part"), []byte(has), 0o600))
		check.Fails(t, r.restore(r.path("restored"), "full"), "no restore of it has left that")
		is, err := os.ReadFile(r.path("restored.part"))
		check.That(t, err == nil && string(is) == has, "it has %d bytes now: %v", len(is), err)
	}
}

func TestRestoreRefuses(t *testing.T) {
	r := newBench(t, 4*mib)
	r.three()
	r.backUp("other", "", r.change(1))
	for text, names := range map[string][]string{
		"name the full backup first":                  {"one", "two"},
		"another backup than":                         {"full", "two"},
		"it must be the first file":                   {"full", "other"},
		"to one of snapshot \"full\"":                 {"other", "one"},
		"one is an increment to another backup than ": {"full", "one", "one"},
	} {
		check.Fails(t, r.restore(r.path("restored"), names...), text)
	}
	check.Is(t, r.restore(r.path("other"), "full"), backup.ErrExists)
	left, _ := filepath.Glob(r.path("restored*"))
	check.That(t, len(left) == 0, "left: %v", left)
	check.Fails(t, r.restore("/dev/crust-nothing", "full"), "there is no device /dev/crust-nothing") // a device that is not there
}

// TestDamage changes a bit of a file, or cuts it off, anywhere.
func TestDamage(t *testing.T) {
	r := newBench(t, 4*mib)
	r.three()
	whole := check.Value(os.ReadFile(r.path("one")))(t)
	for i := range 150 {
		bad := bytes.Clone(whole)
		at := r.random.IntN(len(bad))
		if i < 60 {
			at = i // the header
		}
		bad[at] ^= 1 << r.random.IntN(8)
		if i%3 == 2 {
			bad = bad[:at]
		}
		check.Must(r.t, os.WriteFile(r.path("bad"), bad, 0o600))
		err := r.restore(r.path("restored"), "full", "bad")
		check.Require(t, err != nil, "byte %d of %s is wrong, and it was restored", at, hex.EncodeToString(whole[:16]))
		left, _ := filepath.Glob(r.path("restored*"))
		check.Require(t, len(left) == 0, "byte %d: left %v", at, left)
	}
	check.Must(r.t, os.WriteFile(r.path("bad"), append(bytes.Clone(whole), 0), 0o600))
	check.That(t, r.restore(r.path("restored"), "full", "bad") != nil, "something follows the end")
}
