package rig

import (
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// Crashed returns an image of a filesystem as it is in the moment when whoever has it
// mounted is killed: with a file named "file" and a journal to replay. The device, of
// which image is the backing file, is unmounted cleanly afterwards.
//
// Any sync(2) on the machine, also of another test, leaves a moment in which there is
// nothing to replay. So each image is tried, and another one is made where it needs none.
func Crashed(t T, device, image, fs, content string) string {
	t.Helper()
	where := t.TempDir()
	for range 20 {
		check.Must(t, unix.Mount(device, where, fs, 0, ""))
		crashed := filepath.Join(t.TempDir(), "crashed")
		err := writeSynced(filepath.Join(where, "file"), content)
		out, copyErr := exec.Command("cp", "--sparse=always", image, crashed).CombinedOutput()
		check.Must(t, unix.Unmount(where, 0))
		check.Must(t, err)
		check.Require(t, copyErr == nil, "%v: %s", copyErr, out)
		readOnly := Loop(t, crashed, loopdev.Options{ReadOnly: true})
		if unix.Mount(readOnly, where, fs, unix.MS_RDONLY, "") != nil {
			return crashed
		}
		check.Must(t, unix.Unmount(where, 0))
	}
	t.Fatal("the kernel mounts each image: nothing is to be replayed")
	return ""
}

func writeSynced(path, content string) error {
	file, err := os.Create(path) //nolint:gosec // of a test's own filesystem
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if _, err := file.WriteString(content); err != nil {
		return err
	}
	return file.Sync()
}
