package staging

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestTargetsThatWentAreForgotten(t *testing.T) {
	dir := t.TempDir()
	here, gone, mount := dir+"/pods/a/mount", dir+"/pods/b/mount", "/proc"
	check.Must(t, os.MkdirAll(filepath.Dir(here), 0o750))
	records := check.Value(openRecords(dir+"/csi", zap.NewNop()))(t)
	for _, rec := range []Record{
		{VolumeID: VolumeID{"d", "both"}, OnHost: []string{gone, here, mount}},
		{VolumeID: VolumeID{"d", "gone"}, OnHost: []string{gone}},
		{VolumeID: VolumeID{"d", "staged"}, OnHost: []string{gone}, Stage: &StageRecord{Path: "/s", At: StagedOnHost}},
	} {
		check.Must(t, records.Put(rec))
	}
	records = check.Value(openRecords(dir+"/csi", zap.NewNop()))(t)
	got := records.Get(VolumeID{"d", "both"}).OnHost
	check.That(t, slices.Equal(got, []string{here, mount}), "kept: %q", got)
	of := records.Get(VolumeID{"d", "staged"})
	check.That(t, len(of.OnHost) == 0 && of.Stage != nil, "kept: %+v", of)
	left, err := os.ReadDir(dir + "/csi")
	check.That(t, err == nil && len(left) == 2, "records: %q", left)
	raw := Record{VolumeID: VolumeID{"d", "raw"}, Raw: map[string]bool{here: true}}
	check.Must(t, records.Put(raw))
	delete(raw.Raw, here) // the caller's own: others read the record at any time
	check.That(t, records.Get(raw.VolumeID).Raw[here], "a record changed without Put")
}

// TestRecordsThatCannotBeUsed: a newer version's stays and is named, one that a kill left is removed, and one that
// cannot be removed stays in memory.
func TestRecordsThatCannotBeUsed(t *testing.T) {
	state, id := t.TempDir(), VolumeID{"d", "v"}
	dir := filepath.Join(state, RecordDir)
	check.Empty(t, check.Value(StagedDevices(state))(t), "without records")
	check.Must(t, os.WriteFile(dir, nil, 0o600))
	check.Fails(t, check.Err(StagedDevices(state))) // or no directory counts as no records
	check.Must(t, os.Remove(dir))
	records := check.Value(openRecords(dir, zap.NewNop()))(t)
	check.Must(t, records.Put(Record{VolumeID: VolumeID{"d", "v"}, Stage: &StageRecord{Path: "/s", At: StagedAsDevice}}))
	check.Must(t, records.Put(Record{VolumeID: VolumeID{"d", "on-host"}, OnHost: []string{"/proc/mount"}}))
	file := filepath.Join(dir, FileName(id))
	raw := check.Value(os.ReadFile(file))(t)
	check.Must(t, os.WriteFile(dir+"/newer.json", []byte(strings.Replace(string(raw), `"version":1`, `"version":2`, 1)), 0o600))
	check.Must(t, os.WriteFile(dir+"/half.new", raw[:9], 0o600))
	core, logged := observer.New(zap.ErrorLevel)
	records, err := openRecords(dir, zap.New(core))
	left, _ := os.ReadDir(dir)
	check.That(t, err == nil && len(left) == 3 && logged.Len() == 1 && records.Get(id).Stage != nil, "%v, left are %v, and logged %v", err, left, logged.All())
	staged, err := StagedDevices(state)
	check.That(t, len(staged) == 1 && err != nil && strings.Contains(err.Error(), "newer.json"), "%v, %v", staged, err)
	check.Must(t, errors.Join(os.Remove(file), os.MkdirAll(file+"/x", 0o700)))
	check.Fails(t, records.Put(Record{VolumeID: VolumeID{"d", "v"}}))
	check.That(t, records.Get(id).Stage != nil, "a record that is still there was removed from memory")
	check.Must(t, os.RemoveAll(file))
	check.Must(t, records.Put(Record{VolumeID: VolumeID{"d", "v"}}))
}

// TestAPipeAmongTheRecords has a record's name lead to a pipe that nobody writes to: the
// daemon must not wait for it at its start.
func TestAPipeAmongTheRecords(t *testing.T) {
	state := t.TempDir()
	dir := filepath.Join(state, RecordDir)
	check.Must(t, os.Mkdir(dir, 0o700))
	check.Must(t, unix.Mkfifo(filepath.Join(dir, "pipe.json"), 0o600))
	read := check.Begin(func() error { return check.Err(StagedDevices(state)) })
	select {
	case err := <-read:
		check.That(t, err != nil && strings.Contains(err.Error(), "pipe.json"), "got %v", err)
	case <-time.After(10 * time.Second):
		t.Fatal("the records are never read to their end")
	}
}
