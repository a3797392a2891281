package daemon

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/ondisk"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestLacksGroup: what is not known of the root directory counts as not writable.
func TestLacksGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, make([]byte, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	device := volume.Device{Kind: volume.ImageFile, Path: path, Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev), Inode: st.Ino}
	lacks := func(key volume.Key, group string) bool {
		d := &disks{reader: ondisk.New()}
		return d.LacksGroup(t.Context(), &volume.Volume{Key: key, Device: device, FSType: "ext4", Group: group})
	}
	if !lacks("blank", "2000") {
		t.Error("nothing is known of a blank device")
	}
	for _, args := range [][]string{
		{"mkfs.ext4", "-q", "-E", "root_owner=0:2000", path}, {"debugfs", "-w", "-R", "set_inode_field <2> mode 040775", path},
	} {
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil { // #nosec G204 -- of the test
			t.Fatalf("%s: %v: %s", args[0], err, out)
		}
	}
	if lacks("formatted", "2000") {
		t.Error("the group can write to its own root directory")
	}
	if !lacks("formatted", "3000") {
		t.Error("another group cannot")
	}
}
