package kata

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func plainVolume() *volume.Volume {
	const target = "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/v/mount"
	return &volume.Volume{
		Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, FSType: "ext4",
		Device: volume.Device{Kind: volume.BlockDevice, Path: "/dev/vdb"}, PodUID: "p", Handler: Name,
	}
}

func TestEncodeInfo(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*volume.Volume)
		want   string
	}{
		"plain": {func(*volume.Volume) {}, `{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4"}`},
		"group": {func(v *volume.Volume) { v.Group = "2000" },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","metadata":{"fsGroup":"2000"}}`},
		"policy": {func(v *volume.Volume) { v.Group, v.GroupPolicy = "2000", volume.GroupOnMismatch },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","metadata":{"fsGroup":"2000","fsGroupChangePolicy":"OnRootMismatch"}}`},
		"read-only": {func(v *volume.Volume) { v.ReadOnly, v.MountFlags = true, []string{"rw", "noatime"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["noatime","ro"]}`},
		"ro in the flags alone": {func(v *volume.Volume) { v.MountFlags = []string{"ro,noatime"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["noatime"]}`},
		"ro twice": {func(v *volume.Volume) { v.ReadOnly, v.MountFlags = true, []string{"ro", "ro"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["ro"]}`},
		"of mount(8)": {func(v *volume.Volume) {
			v.MountFlags = []string{"_netdev,nofail", "noatime", "x-systemd.automount", "comment=a"}
		},
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["noatime"]}`},
		"quoted comma": {func(v *volume.Volume) { v.MountFlags = []string{`context="a:s0:c1,c2",discard`} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["context=\"a:s0:c1,c2\"","discard"]}`},
	} {
		t.Run(name, func(t *testing.T) {
			v := plainVolume()
			c.change(v)
			raw, err := layout{}.Encode(v)
			if err != nil || string(raw) != c.want {
				t.Errorf("%s, %v\nwant %s", raw, err, c.want)
			}
			if info, err := abi.Parse(raw); err != nil || info.Device != "/dev/vdb" {
				t.Errorf("read back: %+v, %v", info, err)
			}
		})
	}
}

func TestDirName(t *testing.T) {
	longest := "/" + strings.Repeat("x", maxTarget-1)
	if n := len(dirName(longest)); n > 255 {
		t.Errorf("the longest target has a name of %d bytes", n)
	}
	if n := len(dirName(longest + "x")); n <= 255 {
		t.Errorf("a longer target has a name of %d bytes: the limit is too low", n)
	}
	for _, target := range []string{longest, "/a b/ä?>~", "/a"} {
		if got, ok := targetOf(dirName(target)); !ok || got != target {
			t.Errorf("%q came back as %q", target, got)
		}
	}
	for _, name := range []string{"", "not base64!", "YQ==", "YQ"} {
		if got, ok := targetOf(name); ok {
			t.Errorf("%q was taken for target %q", name, got)
		}
	}
}

func TestCheck(t *testing.T) {
	h := &Handler{cfg: Config{Filesystems: []string{"ext4", "xfs", "btrfs"}}}
	const fine = volume.Kind(255)
	for name, c := range map[string]struct {
		change func(*volume.Volume)
		want   volume.Kind
	}{
		"plain":            {func(*volume.Volume) {}, fine},
		"longest target":   {func(v *volume.Volume) { v.Target = "/" + strings.Repeat("x", 188) }, fine},
		"too long target":  {func(v *volume.Volume) { v.Target = "/" + strings.Repeat("x", 189) }, volume.Invalid},
		"relative target":  {func(v *volume.Volume) { v.Target = "x" }, volume.Invalid},
		"non-UTF-8 target": {func(v *volume.Volume) { v.Target = "/\xff" }, volume.Invalid},
		"no device":        {func(v *volume.Volume) { v.Device.Path = "" }, volume.Invalid},
		"filesystem":       {func(v *volume.Volume) { v.FSType = "ntfs" }, volume.Unsupported},
		"group":            {func(v *volume.Volume) { v.Group = "1000" }, fine},
		"group 0":          {func(v *volume.Volume) { v.Group = "0" }, volume.Unsupported},
		"octal group":      {func(v *volume.Volume) { v.Group = "010" }, volume.Invalid},
		"named group":      {func(v *volume.Volume) { v.Group = "staff" }, volume.Invalid},
		"negative group":   {func(v *volume.Volume) { v.Group = "-1" }, volume.Invalid},
		"lone policy":      {func(v *volume.Volume) { v.GroupPolicy = volume.GroupAlways }, volume.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			v := plainVolume()
			c.change(v)
			err := h.Check(v)
			if c.want == fine && err != nil || c.want != fine && (err == nil || volume.KindOf(err) != c.want) {
				t.Errorf("%v of kind %v, want %v", err, volume.KindOf(err), c.want)
			}
		})
	}
}
