package kata

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestModes(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	for path, want := range map[string]fs.FileMode{
		b.cfg.DirectVolumes: fs.ModeDir | 0o700, b.dir(v): fs.ModeDir | 0o700, filepath.Join(b.dir(v), infoName): 0o600,
	} {
		info, err := os.Stat(path)
		check.That(t, err == nil && info.Mode() == want, "%s: %v, %v, want %v", path, info.Mode(), err, want)
	}
}

func statOf(t *testing.T, path string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	check.Must(t, unix.Lstat(path, &st))
	return st
}

// A sandbox that has the volume keeps its id file over a change.
func TestRepublishKeepsIDs(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	b.startShim(t, v, "sb1")
	changed := *v
	changed.MountFlags = []string{"noatime"}
	b.publish(t, &changed)
	ids, err := b.h.bindings.candidates(v)
	check.That(t, err == nil && len(ids) == 1 && ids[0] == "sb1", "ids %q", ids)
	// A lost file is put back, too.
	check.Must(t, os.Remove(filepath.Join(b.dir(v), infoName)))
	published(t, b, "a")
	_, exists := b.Projection(t, v)
	check.That(t, exists, "the lost file was not put back")
}

// What was right once is not read again while its times say that nothing has changed.
func TestChangeAfterALook(t *testing.T) {
	t.Parallel()
	b := newBench(t, kataemu.Go)
	changes := map[string]func(dir, file string) error{
		"nothing": func(string, string) error { return nil },
		"written": func(_, file string) error { return os.WriteFile(file, []byte("{}"), 0o600) },
		"replaced": func(dir, file string) error {
			return errors.Join(os.WriteFile(dir+"/x", nil, 0o600), os.Rename(dir+"/x", file))
		},
		"removed":    func(_, file string) error { return os.Remove(file) },
		"all gone":   func(dir, _ string) error { return os.RemoveAll(dir) },
		"of another": func(dir, _ string) error { return errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)) },
	}
	volumes := map[string]*volume.Volume{}
	for what := range changes {
		volumes[what] = b.Volume(strings.ReplaceAll(what, " ", "-"))
		b.publish(t, volumes[what])
	}
	time.Sleep(1100 * time.Millisecond) // the kernel's times are coarse
	for what, v := range volumes {
		b.publish(t, v) // sees it
		check.Must(t, changes[what](b.dir(v), filepath.Join(b.dir(v), infoName)))
		changed, err := b.h.Publish(t.Context(), v)
		if what == "of another" {
			check.Kind(t, err, volume.Conflict)
			continue
		}
		check.That(t, err == nil && changed == (what != "nothing"), "%s: published anew: %t, %v", what, changed, err)
	}
}

// Retract never goes into a directory that somebody filled.
func TestRetractIsNotRecursive(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	precious := filepath.Join(b.dir(v), "sub", "precious")
	for _, dir := range []string{filepath.Dir(precious), filepath.Join(b.dir(v), "empty")} {
		check.Must(t, os.Mkdir(dir, 0o700))
	}
	check.Must(t, os.WriteFile(precious, []byte("data"), 0o600))
	check.Must(t, b.h.Retract(t.Context(), v))
	check.Is(t, check.Err(os.Stat(b.dir(v))), os.ErrNotExist) // or it is still in Kata's tree
	check.Equal(t, b.CountLeftovers(t), 1, "leftovers")
	b.Restart(t)
	kept, err := filepath.Glob(filepath.Join(b.cfg.TempDir, "*", "sub", "precious"))
	check.That(t, err == nil && len(kept) == 1, "the file in the sub-directory is gone: %v, %v", kept, err)
	published(t, b, "a")
}

// Another writer's empty directory is on its way to being a volume.
func TestForeignEmptyDirectory(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := b.Volume("a")
	check.Must(t, os.Mkdir(b.dir(v), 0o700))
	handlers.WantError(t, check.Err(b.h.Publish(t.Context(), v)), volume.Conflict, v, "another program")
	check.Must(t, b.h.Retract(t.Context(), v))
	check.Value(os.Stat(b.dir(v)))(t) // or a foreign directory was removed
}

// TestRetractOfAnotherKey leaves the directory of a volume that was published on the path while that led elsewhere.
func TestRetractOfAnotherKey(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	other := *v
	other.Key = "another"
	check.Must(t, b.h.Retract(t.Context(), &other))
	_, exists := b.Projection(t, v)
	check.That(t, exists, "the projection of a live volume is gone")
}

// Somebody removes a directory that all volumes need.
func TestDirectoriesAreMadeAgain(t *testing.T) {
	b, v := publishedBench(t, kataemu.Go)
	for _, gone := range []string{b.cfg.DirectVolumes, filepath.Join(b.dir(v), infoName)} {
		check.Must(t, errors.Join(os.RemoveAll(gone), os.RemoveAll(b.cfg.TempDir)))
		published(t, b, "a")
		_, exists := b.Projection(t, v)
		check.Require(t, exists, "not published")
	}
	check.Must(t, os.RemoveAll(b.cfg.TempDir))
	check.Must(t, b.h.Retract(t.Context(), v))
	check.Is(t, check.Err(os.Stat(b.dir(v))), os.ErrNotExist) // or a sandbox finds a device whose claim ends
}

func TestPlaces(t *testing.T) {
	dir := check.ShortDir(t)
	inside := testConfig(dir)
	inside.TempDir = filepath.Join(inside.DirectVolumes, "tmp")
	check.Kind(t, check.Err(New(inside, nil, zap.NewNop())), volume.Invalid) // a TempDir in Kata's tree
	check.Fails(t, check.Err(New(inside, nil, zap.NewNop())), "put it elsewhere")
	elsewhere := testConfig(dir)
	elsewhere.TempDir = "/dev/shm/crust-proxy-test"
	t.Cleanup(func() { _ = os.Remove(elsewhere.TempDir) })
	check.Needs(t, statOf(t, "/dev/shm").Dev != statOf(t, dir).Dev, "a filesystem of its own at /dev/shm")
	check.Kind(t, check.Err(New(elsewhere, nil, zap.NewNop())), volume.Invalid) // a TempDir on another filesystem
}

// TestOthersCanReadTheWholeTree: a driver that hands volumes to Kata by itself reads all of them, ours too, and fails if
// it cannot read one. Each write of ours happens beside such readers.
func TestOthersCanReadTheWholeTree(t *testing.T) {
	b := newBench(t, kataemu.Go)
	long := 2 * time.Second
	if rig.Soak() {
		long = 30 * time.Second
	}
	b.PublishForeign(t, b.Volume("of another driver"))
	ctx := check.Within(t, long)
	var running sync.WaitGroup
	var read atomic.Int64
	began := time.Now()
	goOn := func() bool {
		return ctx.Err() == nil || read.Load() <= 100 && !t.Failed() && time.Since(began) < 2*time.Minute
	}
	for range 4 {
		running.Go(func() {
			for goOn() {
				volumes, err := kataemu.Scan(b.cfg.DirectVolumes)
				if err != nil {
					t.Error(err)
					return
				}
				read.Add(int64(volumes))
			}
		})
	}
	for _, name := range []string{"a", "ä b", strings.Repeat("c", 20)} {
		v := b.Volume(name)
		changed := *v
		changed.MountFlags = []string{strings.Repeat("x", 3000)}
		running.Go(func() {
			for goOn() {
				for _, one := range []*volume.Volume{v, &changed, v} {
					check.NoError(t, check.Err(b.h.Publish(context.WithoutCancel(ctx), one)), "publish")
				}
				check.NoError(t, errors.Join(kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"), b.h.Retract(context.WithoutCancel(ctx), v)), "retract")
			}
		})
	}
	running.Wait()
	check.That(t, read.Load() > 100, "only %d volumes were read", read.Load())
}

// TestForeignDevicesAreAdoptedWhateverTheVolumeIs: the device has an owner, also where
// we know nothing of the volume's type.
func TestForeignDevicesAreAdoptedWhateverTheVolumeIs(t *testing.T) {
	for raw, adopted := range map[string]bool{
		`{"volume-type":"","device":"/dev/vdq","fstype":"ext4"}`:    true,
		`{"volume-type":"spdkvol","device":"/dev/vdq","fstype":""}`: true,
		`{"device":"/dev/vdq"}`:                                     true,
		`{"volume-type":"directvol","device":"/dev/vdq","fstype":"ext4","metadata":{"azure.csi.disk/volume-id":"/subscriptions/a"}}`: true,
		`{"volume-type":7,"device":"/dev/vdq","options":"ro","metadata":[]}`:                                                         true,
		`{"volume-type":"directvol","device":"/dev/./vdq","fstype":"a\u0000b"} x`:                                                    true,
		`{"volume-type":"directvol","device":"vdq","fstype":"ext4"}`:                                                                 false,
		`{"volume-type":"directvol","fstype":"ext4"}`:                                                                                false,
	} {
		b := newBench(t, kataemu.Go)
		b.stop() // its watch would adopt as well, at any moment
		v := b.Volume("a")
		check.Must(t, os.Mkdir(b.dir(v), 0o700))
		check.Must(t, os.WriteFile(b.dir(v)+"/"+infoName, []byte(raw), 0o600))
		b.h.AdoptForeign()
		var got []*volume.Volume
		for _, one := range b.h.Adopted() {
			if one.Device.Path == "/dev/vdq" {
				got = append(got, one)
			}
		}
		check.That(t, (len(got) == 1) == adopted, "%s: adopted %v", raw, got)
	}
}

// Where kubelet's root is a link, a runtime is given the path with the link in it:
// Kata looks for a directory that is named by that.
func TestTargetThroughALink(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := b.Volume("a")
	v.Target = filepath.Join(filepath.Dir(v.ResolvedTarget), "..", "link", "a")
	b.publish(t, v)
	_, shown := b.Projection(t, v)
	check.Require(t, shown && filepath.Base(b.dir(v)) == dirName(filepath.Clean(v.Target)), "published as %s", b.dir(v))
	b.startShim(t, v, "sb1")
	b.Restart(t)
	known := func(key volume.Key) bool { return key == v.Key }
	orphans, err := b.h.Orphans(known)
	check.Require(t, err == nil && len(orphans) == 0, "a known volume is an orphan: %v, %v", orphans, err)
	check.Eventually(t, "its sandbox is found after a restart", boundTo(b, v, "sb1"))
	b.stats(t, v)
	orphans, err = b.h.Orphans(func(volume.Key) bool { return false })
	check.Require(t, err == nil && len(orphans) == 1 && orphans[0].Key == v.Key, "%v, %v", orphans, err)
	check.Must(t, b.h.Retract(t.Context(), orphans[0]))
	_, shown = b.Projection(t, v)
	check.Require(t, !shown, "the orphan is still there")
	check.Must(t, b.h.Retract(t.Context(), v))
}

// TestDaemonsOfTwoKubeletsShareATree: neither takes the other's volumes for orphans,
// and each sees that the other's devices have an owner.
func TestDaemonsOfTwoKubeletsShareATree(t *testing.T) {
	b := newBench(t, kataemu.Go)
	v := b.Volume("a")
	root, _, _ := strings.Cut(v.Target, "/pods/")
	none := func(volume.Key) bool { return false }
	handler := func(kubelet, temp string) *Handler {
		cfg := b.cfg
		cfg.KubeletRoot, cfg.TempDir = kubelet, filepath.Join(filepath.Dir(b.cfg.TempDir), temp)
		return check.Value(New(cfg, nil, zap.NewNop()))(t)
	}
	own, other := handler(root, "own"), handler("/elsewhere/kubelet", "other")
	check.Value(own.Publish(t.Context(), v))(t)
	orphans, err := own.Orphans(none)
	check.That(t, err == nil && len(orphans) == 1, "our orphans are %v, %v", orphans, err)
	orphans, err = other.Orphans(none)
	check.That(t, err == nil && len(orphans) == 0, "the other's orphans are %v, %v", orphans, err)
	check.Must(t, other.Retract(t.Context(), v))
	check.Kind(t, check.Err(other.Publish(t.Context(), v)), volume.Conflict) // or it is published over it
	other.AdoptForeign()
	check.That(t, slices.ContainsFunc(other.Adopted(), func(o *volume.Volume) bool { return o.Device.Path == v.Device.Path }),
		"the device's owner is not seen: %v", other.Adopted())
	check.Value(os.Stat(b.dir(v)))(t)
	var value [256]byte
	n, err := unix.Lgetxattr(b.dir(v), "trusted.crust-proxy.root", value[:])
	check.That(t, os.Geteuid() != 0 || err == nil && string(value[:n]) == root, "the directory is signed %q, %v", value[:n], err)
}

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
		"read-only": {func(v *volume.Volume) { v.ReadOnly, v.Group, v.MountFlags = true, "2000", []string{"rw", "noatime"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["noatime","ro"]}`},
		"ro in the flags alone": {func(v *volume.Volume) { v.MountFlags = []string{"ro,noatime"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["noatime"]}`},
		"ro twice": {func(v *volume.Volume) { v.ReadOnly, v.MountFlags = true, []string{"ro", "ro"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["ro"]}`},
		"of mount(8)": {func(v *volume.Volume) {
			v.MountFlags = []string{"_netdev,nofail", "noatime", "x-systemd.automount", "comment=a"}
		},
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["noatime"]}`},
		"xfs": {func(v *volume.Volume) { v.FSType, v.ReadOnly = "xfs", true },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"xfs","options":["ro","nouuid"]}`},
		"xfs, as asked": {func(v *volume.Volume) { v.FSType, v.MountFlags = "xfs", []string{"nouuid,discard"} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"xfs","options":["nouuid","discard"]}`},
		"quoted comma": {func(v *volume.Volume) { v.MountFlags = []string{`context="a:s0:c1,c2",discard`} },
			`{"volume-type":"directvol","device":"/dev/vdb","fstype":"ext4","options":["context=\"a:s0:c1,c2\"","discard"]}`},
	} {
		t.Run(name, func(t *testing.T) {
			v := plainVolume()
			c.change(v)
			raw, err := layout{}.Encode(v)
			check.That(t, err == nil && string(raw) == c.want, "%s, %v\nwant %s", raw, err, c.want)
			info, err := abi.Parse(raw)
			check.That(t, err == nil && info.Device == "/dev/vdb", "read back: %+v, %v", info, err)
		})
	}
}

func dirName(target string) string {
	dir, _ := layout{}.DirOf(&volume.Volume{Target: target})
	return dir
}

func TestDirName(t *testing.T) {
	longest := "/" + strings.Repeat("x", maxTarget-1)
	n := len(dirName(longest))
	check.That(t, n <= 255, "the longest target has a name of %d bytes", n)
	n = len(dirName(longest + "x"))
	check.That(t, n > 255, "a longer target has a name of %d bytes: the limit is too low", n)
	for _, target := range []string{longest, "/a b/ä?>~", "/a"} {
		got, ok := targetOf(dirName(target))
		check.That(t, ok && got == target, "%q came back as %q", target, got)
	}
	for _, name := range []string{"", "not base64!", "YQ==", "YQ"} {
		got, ok := targetOf(name)
		check.That(t, !ok, "%q was taken for target %q", name, got)
	}
}

func TestCheck(t *testing.T) {
	h := &Handler{cfg: Config{Filesystems: []string{"ext4", "xfs", "btrfs"}}}
	const fine = volume.Kind(255)
	for name, c := range map[string]struct {
		change func(*volume.Volume)
		want   volume.Kind
	}{
		"longest target":  {func(v *volume.Volume) { v.Target = "/" + strings.Repeat("x", 188) }, fine},
		"too long target": {func(v *volume.Volume) { v.Target = "/" + strings.Repeat("x", 189) }, volume.Invalid},
		"filesystem":      {func(v *volume.Volume) { v.FSType = "ntfs" }, volume.Unsupported},
		"group":           {func(v *volume.Volume) { v.Group = "1000" }, fine},
		"group 0":         {func(v *volume.Volume) { v.Group = "0" }, volume.Unsupported},
		"group, no write": {func(v *volume.Volume) { v.Group, v.ReadOnly = "0", true }, fine},
	} {
		t.Run(name, func(t *testing.T) {
			v := plainVolume()
			c.change(v)
			err := h.Check(v)
			check.That(t, (err == nil) == (c.want == fine) && (err == nil || volume.KindOf(err) == c.want),
				"%v of kind %v, want %v", err, volume.KindOf(err), c.want)
		})
	}
}
