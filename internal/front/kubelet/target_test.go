package kubelet

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestDescribe(t *testing.T) {
	for rel, pod := range map[string]string{
		"pods/u-1/volumes/kubernetes.io~csi/pv/mount":            "u-1",
		"pods/u-1/volume-subpaths/pv/c/0":                        "",
		"pods/../volumes/x/y/mount":                              "",
		"plugins/u-1/volumes/x":                                  "",
		"pods/u-1":                                               "",
		"plugins/kubernetes.io/csi/volumeDevices/publish/pv/u-1": "u-1",
		"plugins/kubernetes.io/csi/volumeDevices/staging/pv":     "",
	} {
		var v volume.Volume
		Describe(&v, rel, sys.NoFD)
		check.That(t, v.PodUID == pod && v.Driver == "", "%s: pod %q, driver %q", rel, v.PodUID, v.Driver)
	}
}

func TestDescribeReadsTheDriverBesideTheTarget(t *testing.T) {
	for text, driver := range map[string]string{
		`{"driverName":"block.example.com"}`: "block.example.com",
		`{"driverName":"../x"}`:              "",
		`{"driverName":`:                     "",
		``:                                   "",
	} {
		dir := t.TempDir()
		check.Must(t, os.WriteFile(filepath.Join(dir, "vol_data.json"), []byte(text), 0o600))
		fd := check.Value(sys.OpenDir(dir))(t)
		var v volume.Volume
		Describe(&v, "pods/u/volumes/x/pv/mount", fd)
		named := volume.Volume{Driver: "known"}
		Describe(&named, "pods/u/volumes/x/pv/mount", fd)
		sys.CloseFD(fd)
		check.That(t, v.Driver == driver && named.Driver == "known", "%s: driver %q, %q", text, v.Driver, named.Driver)
	}
}
