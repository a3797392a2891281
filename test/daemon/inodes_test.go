//go:build system

package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// TestStartWithoutFreeInodes: somebody has used up all of /run's inodes. The daemon
// starts, serves what is there, and volumes can go.
func TestStartWithoutFreeInodes(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	req := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4"))
	stage(t, d, req)
	d.Kill()
	var fs unix.Statfs_t
	check.Must(t, unix.Statfs(d.Dir, &fs))
	check.Must(t, unix.Mount("", d.Point, "", unix.MS_REMOUNT, fmt.Sprintf("nr_inodes=%d", fs.Files-fs.Ffree)))
	err := os.Mkdir(filepath.Join(d.Dir, "one-more"), 0o700)
	check.Require(t, errors.Is(err, unix.ENOSPC), "there is an inode left: %v", err)
	d.Start()
	shown(t, d, req.GetVolumeTargetPath())
	unstage(t, d, req)
	d.WantClean()
}
