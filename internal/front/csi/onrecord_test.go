package csi

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
)

func TestStagedPrivatelyIsReadFromTheRecords(t *testing.T) {
	r := newRig(t, deferAll)
	if got, err := staging.StagedDevices(r.dir + "/nowhere"); got != nil || err != nil {
		t.Errorf("without a state directory: %+v, %v", got, err)
	}
	r.stage()
	before := files(t, r.cfg.StateDir)
	got, err := staging.StagedDevices(r.cfg.StateDir)
	if want := []staging.Staged{{Driver: driverName, VolumeID: "vol-1", Path: r.staging()}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	if live := r.front.StagedDevices(); !slices.Equal(live, got) {
		t.Errorf("the running front has %+v", live)
	}
	if after := files(t, r.cfg.StateDir); !slices.Equal(before, after) {
		t.Errorf("reading changed %q to %q", before, after)
	}
	dir := filepath.Join(r.cfg.StateDir, staging.RecordDir)
	r.ok(nil, os.WriteFile(dir+"/half.json.new", []byte("{"), 0o600))
	r.ok(nil, os.WriteFile(dir+"/other-boot.json", []byte(`{"version":1,"boot":"x","driver":"d","volumeID":"v","stage":{"path":"/p","at":"private","rule":""}}`), 0o600))
	if got, err := staging.StagedDevices(r.cfg.StateDir); err != nil || len(got) != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	for name, text := range map[string]string{"bad.json": "{", "newer.json": `{"version":99}`} {
		r.ok(nil, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
		if got, err := staging.StagedDevices(r.cfg.StateDir); err == nil || len(got) != 1 {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		r.ok(nil, os.Remove(dir+"/"+name))
	}
	r.front.SetPolicy(&policy.Policy{})
	r.ok(nil, r.publish("p1")) // staged anew, on the host
	if got, err := staging.StagedDevices(r.cfg.StateDir); err != nil || len(got) != 0 {
		t.Errorf("got %+v, %v", got, err)
	}
	if live := r.front.StagedDevices(); len(live) != 0 {
		t.Errorf("the running front has %+v", live)
	}
}
