package abi_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const target = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount"

func testVolume() *volume.Volume {
	return &volume.Volume{
		Key: volume.KeyOf(target), Target: target, ResolvedTarget: target, PodUID: "1", FSType: "xfs",
		Device:     volume.Device{Kind: volume.BlockDevice, Path: "/dev/sdb", Major: 8, Minor: 16},
		MountFlags: []string{"noatime,nodiratime", "discard"}, ReadOnly: true,
		Group: "2000", GroupPolicy: volume.GroupOnMismatch,
	}
}

func TestEncode(t *testing.T) {
	raw := check.Value(abi.Encode(testVolume()))(t)
	want := `{"volume-type":"block","device":"/dev/sdb","fstype":"xfs","metadata":{"crust.device":"8:16",` +
		`"crust.podUID":"1","crust.targetPath":"` + target + `","fsGroup":"2000","fsGroupChangePolicy":"OnRootMismatch"},` +
		`"options":["noatime","nodiratime","discard","ro"]}`
	diff := cmp.Diff(want, string(raw))
	check.Require(t, diff == "", "%v", diff)
	info := check.Value(abi.Parse(raw))(t)
	gid, wanted, err := info.Group()
	major, minor, known, _ := info.DeviceNumber()
	check.Require(t, info.ReadOnly() && info.PodUID() == "1" && info.Target() == target && gid == 2000 && wanted && err == nil &&
		info.GroupPolicy() == volume.GroupOnMismatch && major == 8 && minor == 16 && known, "%+v", info)
	check.Require(t, string(volume.KeyOf(target)) == abi.DirName(target), "a volume's directory is not named by its key")
}

func TestParseRefuses(t *testing.T) {
	for name, raw := range map[string]string{
		"nothing":              ``,
		"two values":           `{"volume-type":"block","device":"/d","fstype":"x"}{}`,
		"no device":            `{"volume-type":"block","fstype":"x"}`,
		"a relative device":    `{"volume-type":"block","device":"d","fstype":"x"}`,
		"a path as filesystem": `{"volume-type":"block","device":"/d","fstype":"../x"}`,
		"an empty option":      `{"volume-type":"block","device":"/d","fstype":"x","options":[""]}`,
		"a control character":  `{"volume-type":"block","device":"/d","fstype":"x","options":["a\nb"]}`,
		"a group's name":       `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"fsGroup":"staff"}}`,
		"an octal group":       `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"fsGroup":"010"}}`,
		"no group at all":      `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"fsGroup":"4294967295"}}`,
		"an odd policy":        `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"fsGroup":"1","fsGroupChangePolicy":"Never"}}`,
		"policy without group": `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"fsGroupChangePolicy":"Always"}}`,
		"an odd device":        `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"crust.device":"8"}}`,
		"a relative target":    `{"volume-type":"block","device":"/d","fstype":"x","metadata":{"crust.targetPath":"t"}}`,
	} {
		info, err := abi.Parse([]byte(raw))
		check.That(t, err != nil, "%s: taken as %+v", name, info)
	}
}

func TestNames(t *testing.T) {
	for name, want := range map[string]bool{
		"0123abc": true, "a.b-c_d": true, strings.Repeat("a", 128): true,
		"": false, ".hidden": false, "-x": false, "a/b": false, "a b": false, strings.Repeat("a", 129): false,
		abi.InfoName: false, abi.CLIName: false, abi.SocketName: false, "..": false,
	} {
		check.Equal(t, abi.IsSandboxID(name), want, "IsSandboxID(%q)", name)
	}
	check.That(t, abi.IsDirName(abi.DirName("x")) && !abi.IsDirName(strings.Repeat("A", 64)) && !abi.IsDirName("../"+strings.Repeat("a", 61)),
		"IsDirName")
}

func FuzzParse(f *testing.F) {
	f.Add(check.Value(abi.Encode(testVolume()))(f))
	f.Fuzz(func(t *testing.T, raw []byte) {
		info, err := abi.Parse(raw)
		if err != nil {
			return
		}
		_, _, err = info.Group()
		check.Require(t, err == nil, "taken with a bad group: %v", err)
		check.Require(t, info.Device[0] == '/' && !strings.ContainsRune(info.FSType, '/'), "taken: %+v", info)
	})
}

// TestLongestVolumeIsRead: paths and options as long as they may be, of characters that HTML or
// JSON escapes, fit the file.
func TestLongestVolumeIsRead(t *testing.T) {
	for _, fill := range []string{"<", `"`, "é"} {
		v := testVolume()
		v.ResolvedTarget, v.Device.Path = "/"+strings.Repeat(fill, 4090/len(fill)), "/"+strings.Repeat(fill, 4090/len(fill))
		v.MountFlags = slices.Repeat([]string{strings.Repeat(fill, 63/len(fill))}, 64)
		raw, err := abi.Encode(v)
		check.Require(t, err == nil && len(raw) <= abi.MaxInfo, "%q: %d bytes, %v", fill, len(raw), err)
		info, err := abi.Parse(raw)
		check.That(t, err == nil && info.Device == v.Device.Path, "%q: read as %+v, %v", fill, info, err)
	}
}
