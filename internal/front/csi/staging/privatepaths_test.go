package staging

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/validation"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestPrivatePathsAreAPureHash(t *testing.T) {
	p := NewPrivatePaths("/var/lib/kubelet", "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices")
	seen := make(map[string]string)
	for _, parts := range [][3]string{
		{"d", "v", "/t"}, {"d", "v/", "t"}, {"d", "v", "t"}, {"dv", "", "/t"}, {"d", "v/t", ""}, {"d", "../../../etc", "/t"},
	} {
		id := VolumeID{parts[0], parts[1]}
		path := p.Publish(id, parts[2])
		check.That(t, path == p.Publish(id, parts[2]) && filepath.Clean(path) == path && strings.HasPrefix(path, "/var/lib/kubelet/plugins/"),
			"%q: %s", parts, path)
		other, double := seen[path]
		check.That(t, !double, "%q and %s have one path", parts, other)
		seen[path] = strings.Join(parts[:], " ")
	}
	// As drivers search for raw block: Trident by "pvc-", NBS by these characters and the pod.
	forDrivers := regexp.MustCompile(`/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-[a-z0-9-]+/6f1c-uid$`)
	path := p.Publish(VolumeID{"d", "v"}, "/var/lib/kubelet/pods/6f1c-uid/volumes/kubernetes.io~csi/pv/mount")
	staging := p.Staging(VolumeID{"d", "v"}, "/staging")
	for _, name := range []string{filepath.Base(filepath.Dir(path)), filepath.Base(staging)} {
		check.That(t, len(validation.NameIsDNSSubdomain(name, false)) != 0, "a persistent volume can be called %s", name)
	}
	check.That(t, forDrivers.MatchString(path) && strings.Contains(staging, "/csi/volumeDevices/staging/pvc-"),
		"published at %s, staged at %s", path, staging)
}

// TestPathsOfAnEarlierConfiguration stay a volume's while it is there, and while it cannot be seen whether it is.
func TestPathsOfAnEarlierConfiguration(t *testing.T) {
	root, id := t.TempDir(), VolumeID{"d", "v"}
	p := NewPrivatePaths(root, root+"/new", root+"/used", root+"/new")
	name := filepath.Base(p.Staging(id, "/s"))
	now, staging := root+"/new/staging/"+name, root+"/used/staging/"+name
	for _, want := range []string{now, staging, now} {
		got := p.Staging(id, "/s")
		check.That(t, got == want, "%s, and not %s", got, want)
		if got == now {
			check.Must(t, p.MakeDir(staging))
		} else {
			check.Must(t, p.removeStaging(staging))
		}
	}
	check.WithoutDescriptors(t, func() {
		_, err := p.Exists(now)
		check.That(t, err != nil && p.Staging(id, "/s") != now, "what cannot be seen is not there: %v", err)
	})
}

func exists(t *testing.T, p *PrivatePaths, where string) bool {
	t.Helper()
	return check.Value(p.Exists(where))(t)
}

// TestRemovingKeepsWhatIsNotOurs is a driver that leaves things behind, and a private directory that leads elsewhere.
func TestRemovingKeepsWhatIsNotOurs(t *testing.T) {
	root := t.TempDir()
	elsewhere := t.TempDir()
	p := NewPrivatePaths(root, root+"/plugins/x")
	id := VolumeID{"d", "v"}
	device := p.Publish(id, "/t")
	write := func(path, content string) {
		t.Helper()
		check.Must(t, p.MakeDir(filepath.Dir(device)))
		check.Must(t, os.WriteFile(path, []byte(content), 0o600))
	}
	write(device, "")
	err := p.RemovePublish(device)
	check.That(t, err == nil && !exists(t, p, filepath.Dir(device)), "an empty file stays: %v", err)
	write(device, "somebody's image")
	err = p.RemovePublish(device)
	check.That(t, err == nil && exists(t, p, device), "a file with data has gone: %v", err)
	check.Must(t, os.RemoveAll(filepath.Dir(filepath.Dir(device))))
	write(elsewhere+"/"+deviceName, "")
	check.Must(t, os.RemoveAll(filepath.Dir(device)))
	check.Must(t, os.Symlink(elsewhere, filepath.Dir(device)))
	check.That(t, !exists(t, p, device), "a device is seen through a link that leads out of the kubelet root")
	_ = p.RemovePublish(device)
	check.NoError(t, check.Err(os.Stat(elsewhere+"/"+deviceName)), "a file outside of the kubelet root was removed")
}
