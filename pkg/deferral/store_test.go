package deferral

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func testRecord(target string) *record {
	return &record{Version: recordVersion, Boot: "boot", Volume: volume.Volume{
		Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Backing: "/dev/x", Handler: "kata", FSType: "ext4",
		Device: volume.Device{Kind: volume.BlockDevice, Path: "/dev/x", Major: 7, Minor: 3}, MountFlags: []string{"noatime"},
	}}
}

func newTestStore(t *testing.T) *store {
	t.Helper()
	return check.Value(openStore(t.TempDir()))(t)
}

func TestStoreKeepsRecords(t *testing.T) {
	s := newTestStore(t)
	want := testRecord("/a")
	want.HostMounts = true
	check.Must(t, os.Remove(filepath.Join(s.dir, tmpDir))) // by somebody; it is made again
	check.Must(t, s.put(want))
	found, err := s.load()
	check.Require(t, err == nil && len(found.volumes) == 1 && len(found.problems) == 0, "loaded %+v, %v", found, err)
	check.Same(t, cmp.Diff(want, found.volumes[0], cmpopts.IgnoreUnexported(record{})), "-want +got")
	for range 2 { // both steps are idempotent
		check.Must(t, s.beginRemoval(want.Key))
	}
	found, _ = s.load()
	check.Require(t, len(found.volumes) == 0 && len(found.removing) == 1, "after beginRemoval: %+v", found)
	for range 2 {
		check.Must(t, s.endRemoval(want.Key))
	}
	found, _ = s.load()
	check.Require(t, len(found.volumes)+len(found.removing) == 0, "after endRemoval: %+v", found)
}

func TestStoreClearsWhatAKillLeftHalfWritten(t *testing.T) {
	s := newTestStore(t)
	half := filepath.Join(s.dir, "tmp", "abc.1")
	check.Must(t, os.WriteFile(half, []byte("{"), 0o600))
	check.Value(openStore(s.dir))(t)
	check.Fails(t, check.Err(os.Stat(half))) // or a half-written file stays
}

// TestReadersSeeWholeRecords reads a record while it is rewritten.
func TestReadersSeeWholeRecords(t *testing.T) {
	s := newTestStore(t)
	short, long := testRecord("/a"), testRecord("/a")
	long.MountFlags = []string{strings.Repeat("x", 3000)}
	check.Must(t, s.put(short))
	path := s.path(volumesDir, short.Key)
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if _, err := readRecord(path); err != nil {
					t.Error("torn:", err)
					return
				}
			}
		})
	}
	for range 40 {
		for _, rec := range []*record{long, short} {
			check.Must(t, s.put(rec))
		}
	}
	close(done)
	readers.Wait()
}

func TestKeyOfFile(t *testing.T) {
	key := string(volume.KeyOf("/a"))
	for name, valid := range map[string]bool{key + ".json": true, key: false, key[2:] + ".json": false, strings.ToUpper(key) + ".json": false, key[1:] + "x.json": false} {
		got := keyOfFile(name)
		check.That(t, (got != "") == valid && (!valid || string(got) == key), "%s: %q", name, got)
	}
}

func TestParseRecordRefuses(t *testing.T) {
	whole := testRecord("/a")
	for name, change := range map[string]func(*record){
		"another target": func(r *record) { r.ResolvedTarget = "/b" },
		"no handler":     func(r *record) { r.Handler = "" },
		"no device":      func(r *record) { r.Device = volume.Device{} },
		"newer":          func(r *record) { r.Version = 2 },
		"no version":     func(r *record) { r.Version = 0 },
	} {
		rec := *whole
		change(&rec)
		check.That(t, check.Err(parseRecord(check.Value(json.Marshal(&rec))(t))) != nil, "%s: taken", name)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add(check.Value(json.Marshal(testRecord("/a")))(f))
	f.Add([]byte(`{"version":1,"key":"","device":{"kind":"image"}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		rec, err := parseRecord(raw)
		if err != nil {
			return
		}
		check.That(t, rec.Key == volume.KeyOf(rec.ResolvedTarget), "a record under a wrong key was taken")
		again := check.Value(json.Marshal(rec))(t)
		check.Value(parseRecord(again))(t) // or it does not survive a rewrite
	})
}

// TestEveryRecordThatIsWrittenIsRead: what an instruction may hold, and more than that, is read
// back, or refused while nothing is written.
func TestEveryRecordThatIsWrittenIsRead(t *testing.T) {
	s, random := newTestStore(t), rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same texts each time
	text := func(most int) string {
		hostile := []rune("<>&\"\\'\u2028\u00e9a,")
		var b strings.Builder
		for n := random.IntN(most); b.Len() < n; {
			b.WriteRune(hostile[random.IntN(len(hostile))])
		}
		return b.String()
	}
	var wrote, refused int
	for i := range 100 {
		rec := testRecord("/" + strconv.Itoa(i) + text(4000))
		rec.MountFlags = slices.Repeat([]string{text(1000)}, 1+random.IntN(70))
		rec.Backing, rec.Device.Path = "/"+text(4000), "/"+text(4000)
		rec.Origin = &volume.Origin{VolumeID: text(1 + 300_000*(i%2)), Rule: text(1000), Private: "/" + text(4000), Way: volume.WayBlock, AccessMode: "SINGLE_NODE_WRITER"}
		rec.GrowTo = int64(i) << 30
		err := s.put(rec)
		read, readErr := readRecord(s.path(volumesDir, rec.Key))
		switch {
		case err == nil:
			diff := cmp.Diff(rec, read, cmpopts.IgnoreUnexported(record{}))
			check.Require(t, readErr == nil && diff == "", "written and not read: %v\n%s", readErr, diff)
			wrote++
		case volume.KindOf(err) != volume.Invalid || !errors.Is(readErr, fs.ErrNotExist):
			t.Fatalf("%v; and reading: %v", err, readErr)
		default:
			refused++
		}
		if Validate(&volume.Instruction{
			Type: volume.Block, Target: "/a", Backing: "/b", FSType: "ext4", MountFlags: rec.MountFlags,
		}) == nil && i%2 == 0 && err != nil {
			t.Fatalf("the instruction is valid, and its record is not: %v", err)
		}
	}
	check.That(t, wrote != 0 && refused != 0, "%d were written and %d refused", wrote, refused)
	origin := &volume.Origin{}
	check.That(t, origin.Clone() != origin, "a record shares the origin of its instruction")
}

// TestRecordsOfForcedReleases: what cannot be used is told, and an earlier boot's has no meaning.
func TestRecordsOfForcedReleases(t *testing.T) {
	v := &testRecord("/a").Volume
	for name, c := range map[string]struct {
		rec            heldRecord
		held, problems int
	}{
		"this boot":    {heldRecord{Version: recordVersion, Boot: "boot", Volume: v}, 1, 0},
		"another boot": {heldRecord{Version: recordVersion, Boot: "another", Volume: v}, 0, 0},
		"newer":        {heldRecord{Version: recordVersion + 1, Boot: "boot", Volume: v}, 0, 1},
		"no volume":    {heldRecord{Version: recordVersion, Boot: "boot"}, 0, 1},
		"no device":    {heldRecord{Version: recordVersion, Boot: "boot", Volume: &volume.Volume{Key: v.Key}}, 0, 1},
	} {
		s := newTestStore(t)
		check.Must(t, os.WriteFile(s.heldPath(v), check.Value(json.Marshal(&c.rec))(t), 0o600))
		held, problems := s.loadHeld("boot", os.Remove)
		check.That(t, len(held) == c.held && len(problems) == c.problems, "%s: %v, %v", name, held, problems)
	}
}

func TestOnRecord(t *testing.T) {
	dir := t.TempDir()
	got, held, err := OnRecord(dir+"/nowhere", true)
	check.That(t, got == nil && held == nil && err == nil, "without a state directory: %v, %v, %v", got, held, err)
	boot := check.Value(sys.BootID())(t)
	put := func(part, target, boot string, version int) {
		t.Helper()
		rec := record{Version: version, Boot: boot, Volume: volume.Volume{
			Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Handler: "kata", Device: volume.Device{Kind: volume.BlockDevice},
		}}
		raw := check.Value(json.Marshal(&rec))(t)
		check.Must(t, errors.Join(os.MkdirAll(filepath.Join(dir, part), 0o700), os.WriteFile((&store{dir: dir}).path(part, rec.Key), raw, 0o600)))
	}
	put("volumes", "/t/b", boot, recordVersion)
	put("removing", "/t/a", boot, recordVersion)
	put("volumes", "/t/old", "another boot", recordVersion)
	put("held", "/t/held", boot, recordVersion+1)
	got, _, err = OnRecord(dir, false)
	check.Require(t, err == nil && len(got) == 2 && got[0].Target == "/t/a" && got[1].Target == "/t/b", "%v, %v", got, err)
	_, _, err = OnRecord(dir, true)
	check.That(t, err != nil, "a held device that cannot be read is left out")
	put("volumes", "/t/newer", boot, recordVersion+1)
	got, _, err = OnRecord(dir, false)
	check.That(t, err != nil && len(got) == 2, "a record that cannot be read: %v, %v", got, err)
	check.That(t, HasRecord(dir, volume.KeyOf("/t/newer")) && HasRecord(dir, volume.KeyOf("/t/a")) && !HasRecord(dir, volume.KeyOf("/t/none")), "there is another")
	check.Must(t, os.RemoveAll(dir+"/volumes"))
	check.Must(t, os.WriteFile(dir+"/volumes", nil, 0o600))
	got, _, err = OnRecord(dir, false)
	check.That(t, err != nil && len(got) == 1, "records that cannot be listed: %v, %v", got, err)
}
