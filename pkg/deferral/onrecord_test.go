package deferral

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func TestOnRecord(t *testing.T) {
	dir := t.TempDir()
	if got, err := OnRecord(dir + "/nowhere"); got != nil || err != nil {
		t.Errorf("without a state directory: %v, %v", got, err)
	}
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	put := func(part, target, boot string, version int) {
		t.Helper()
		rec := record{Version: version, Boot: boot, Volume: volume.Volume{
			Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, Handler: "kata", Device: volume.Device{Kind: volume.BlockDevice},
		}}
		raw, err := json.Marshal(&rec)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(dir, part), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile((&store{dir: dir}).path(part, rec.Key), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("volumes", "/t/b", boot, recordVersion)
	put("removing", "/t/a", boot, recordVersion)
	put("volumes", "/t/old", "another boot", recordVersion)
	got, err := OnRecord(dir)
	if err != nil || len(got) != 2 || got[0].Target != "/t/a" || got[1].Target != "/t/b" {
		t.Fatalf("%v, %v", got, err)
	}
	put("volumes", "/t/newer", boot, recordVersion+1)
	if got, err := OnRecord(dir); err == nil || len(got) != 2 {
		t.Errorf("a record that cannot be read: %v, %v", got, err)
	}
}
