package staging

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/zap"
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
