package staging

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestTargetsThatWentAreForgotten(t *testing.T) {
	dir := t.TempDir()
	here, gone, mount := dir+"/pods/a/mount", dir+"/pods/b/mount", "/proc"
	if err := os.MkdirAll(filepath.Dir(here), 0o750); err != nil {
		t.Fatal(err)
	}
	records, err := openRecords(dir+"/csi", zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range []Record{
		{Driver: "d", ID: "both", OnHost: []string{gone, here, mount}},
		{Driver: "d", ID: "gone", OnHost: []string{gone}},
		{Driver: "d", ID: "staged", OnHost: []string{gone}, Stage: &StageRecord{Path: "/s", At: StagedOnHost}},
	} {
		if err := records.Put(rec); err != nil {
			t.Fatal(err)
		}
	}
	if records, err = openRecords(dir+"/csi", zap.NewNop()); err != nil {
		t.Fatal(err)
	}
	if got := records.Get(VolumeID{"d", "both"}).OnHost; !slices.Equal(got, []string{here, mount}) {
		t.Errorf("kept: %q", got)
	}
	if got := records.Get(VolumeID{"d", "staged"}); len(got.OnHost) != 0 || got.Stage == nil {
		t.Errorf("kept: %+v", got)
	}
	if left, err := os.ReadDir(dir + "/csi"); err != nil || len(left) != 2 {
		t.Errorf("records: %q", left)
	}
}

// TestAPipeAmongTheRecords has a record's name lead to a pipe that nobody writes to: the
// daemon must not wait for it at its start.
func TestAPipeAmongTheRecords(t *testing.T) {
	state := t.TempDir()
	dir := filepath.Join(state, RecordDir)
	check.Must(t, os.Mkdir(dir, 0o700))
	check.Must(t, unix.Mkfifo(filepath.Join(dir, "pipe.json"), 0o600))
	read := make(chan error, 1)
	go func() {
		_, err := StagedDevices(state)
		read <- err
	}()
	select {
	case err := <-read:
		if err == nil || !strings.Contains(err.Error(), "pipe.json") {
			t.Errorf("got %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the records are never read to their end")
	}
}
