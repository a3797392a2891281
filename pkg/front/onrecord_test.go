package front

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

func TestStagedPrivatelyIsReadFromTheRecords(t *testing.T) {
	r := newRig(t, deferAll)
	if got, err := StagedPrivately(r.dir + "/nowhere"); got != nil || err != nil {
		t.Errorf("without a state directory: %+v, %v", got, err)
	}
	r.stage()
	before := files(t, r.cfg.StateDir)
	got, err := StagedPrivately(r.cfg.StateDir)
	if want := []Staged{{Driver: driverName, VolumeID: "vol-1", Path: r.staging()}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	if after := files(t, r.cfg.StateDir); !slices.Equal(before, after) {
		t.Errorf("reading changed %q to %q", before, after)
	}
	dir := filepath.Join(r.cfg.StateDir, recordDir)
	r.ok(nil, os.WriteFile(dir+"/half.json.new", []byte("{"), 0o600))
	r.ok(nil, os.WriteFile(dir+"/other-boot.json", []byte(`{"version":1,"boot":"x","driver":"d","volumeID":"v","stage":{"path":"/p","at":"private","rule":""}}`), 0o600))
	if got, err := StagedPrivately(r.cfg.StateDir); err != nil || len(got) != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	for name, text := range map[string]string{"bad.json": "{", "newer.json": `{"version":99}`} {
		r.ok(nil, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
		if got, err := StagedPrivately(r.cfg.StateDir); err == nil || len(got) != 1 {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		r.ok(nil, os.Remove(dir+"/"+name))
	}
	r.front.SetPolicy(&deferral.Policy{})
	r.ok(nil, r.publish("p1")) // staged anew, on the host
	if got, err := StagedPrivately(r.cfg.StateDir); err != nil || len(got) != 0 {
		t.Errorf("got %+v, %v", got, err)
	}
}

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
	for _, rec := range []volumeRecord{
		{Driver: "d", ID: "both", Plain: []string{gone, here, mount}},
		{Driver: "d", ID: "gone", Plain: []string{gone}},
		{Driver: "d", ID: "staged", Plain: []string{gone}, Stage: &stageRecord{Path: "/s", At: stagedAtPath}},
	} {
		if err := records.put(rec); err != nil {
			t.Fatal(err)
		}
	}
	if records, err = openRecords(dir+"/csi", zap.NewNop()); err != nil {
		t.Fatal(err)
	}
	if got := records.get(volumeID{"d", "both"}).Plain; !slices.Equal(got, []string{here, mount}) {
		t.Errorf("kept: %q", got)
	}
	if got := records.get(volumeID{"d", "staged"}); len(got.Plain) != 0 || got.Stage == nil {
		t.Errorf("kept: %+v", got)
	}
	if left := files(t, dir+"/csi"); len(left) != 2 {
		t.Errorf("records: %q", left)
	}
}
