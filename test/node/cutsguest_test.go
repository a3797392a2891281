//go:build system

package node

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/node/cuts"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

const (
	mib = int64(1) << 20
	// cutDisk is the size of a disk whose writes are logged.
	cutDisk = 768 * mib
	// cutContent is how much of a block volume is written, and compared.
	cutContent = 128 << 10
)

// cutFS are the filesystems of such disks, with options that keep the kernel from writing by itself what nobody has synced.
var cutFS = map[string]string{"ext4": "commit=600,noinit_itable", "xfs": "", "btrfs": "commit=600"}

// cutLoad works on one disk in the machine, and marks each call that changes something.
type cutLoad struct {
	csi.ControllerClient
	csi.NodeClient
	csi.GroupControllerClient
	t      *testing.T
	fs     string
	dir    string // where the disk is mounted
	run    string // for sockets and the like, not on the disk
	marker *cuts.Marker
	random *rand.Rand
}

// worksOnDisks runs in the machine: crust-driver, crust-backup and the daemon work on each disk.
func worksOnDisks(t *testing.T) {
	check.Must(t, os.WriteFile("/proc/sys/vm/dirty_expire_centisecs", []byte("60000"), 0))
	for name, options := range cutFS {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &cutLoad{t: t, fs: name, dir: "/cut/" + name, run: "/run/cut-" + name, random: rand.New(rand.NewPCG(0, 0))}
			device := "/dev/disk/by-id/virtio-cut-" + name
			check.Must(t, errors.Join(os.MkdirAll(l.dir, 0o755), os.MkdirAll(l.run, 0o755)))
			check.Must(t, unix.Mount(device, l.dir, name, 0, options))
			l.marker = check.Value(cuts.NewMarker(device, cutDisk))(t)
			process, conn := rig.NewDriver(t, "/usr/local/bin/crust-driver", l.run+"/csi.sock", l.dir+"/driver", "--freeze-limit", "60s")
			l.ControllerClient, l.NodeClient = csi.NewControllerClient(conn), csi.NewNodeClient(conn)
			l.GroupControllerClient = csi.NewGroupControllerClient(conn)
			check.Must(t, process.Start())
			l.configures()
			for round := range 2 {
				l.volumes(strconv.Itoa(round))
			}
			for _, fs := range []string{"ext4", "xfs"} {
				l.pod(fs)
			}
			l.backs()
			unix.Sync() // the log's superblock is written when the disk is flushed
		})
	}
}

// call makes a call, between the marks that it is made and that it was acknowledged.
func (l *cutLoad) call(mark cuts.Mark, do func() error) {
	l.t.Helper()
	mark.Done = false
	check.Must(l.t, l.marker.Put(mark))
	check.Retried(l.t, fmt.Sprint(mark), do)
	mark.Done = true
	check.Must(l.t, l.marker.Put(mark))
}

// facts gathers what a call changes.
type facts map[string]string

func (f facts) volume(id string, size int64, content string) facts {
	f["size "+id], f["image "+id] = strconv.FormatInt(size, 10), strconv.FormatInt(size, 10)
	if content != "" {
		f["content "+id] = content
	}
	return f
}

func (f facts) gone(ids ...string) facts {
	for _, id := range ids {
		for _, kind := range []string{"id", "size", "image", "content"} {
			f[kind+" "+cutName(id)] = ""
		}
	}
	return f
}

// made are whole ids, which are known when a call was acknowledged: those of snapshots and groups have a random part.
func (f facts) made(ids ...string) {
	for _, id := range ids {
		f["id "+cutName(id)] = id
	}
}

var cutRandom = regexp.MustCompile(`\.[0-9A-Z]{26}`)

// cutName is an id without its random part.
func cutName(id string) string { return cutRandom.ReplaceAllString(id, "") }

// cutID is the id that crust-driver makes of a name, without what is random.
func cutID(kind, name string) string {
	return fmt.Sprintf("%s-%.16x", kind, sha256.Sum256([]byte(name)))
}

func cutSum(content []byte) string { return fmt.Sprintf("%.8x", sha256.Sum256(content)) }

// cutVolume is a volume on the disk.
type cutVolume struct {
	*cutLoad
	id, staging, target string
	access              *csi.VolumeCapability
	size                int64
	content             string
	up                  bool
}

func (l *cutLoad) create(name string, size int64, access *csi.VolumeCapability, from *csi.VolumeContentSource, content string) *cutVolume {
	l.t.Helper()
	v := &cutVolume{cutLoad: l, id: cutID("vol", name), staging: l.run + "/staging-" + name, target: l.run + "/target-" + name, access: access, size: size, content: content}
	sets := facts{}.volume(v.id, size, content)
	l.call(cuts.Mark{Sets: sets}, func() error {
		made, err := l.CreateVolume(l.t.Context(), &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{access}, VolumeContentSource: from,
		})
		sets.made(made.GetVolume().GetVolumeId())
		return err
	})
	return v
}

func (v *cutVolume) publish() {
	v.t.Helper()
	if v.up {
		return
	}
	_, err := v.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.access})
	check.Must(v.t, err)
	check.Must(v.t, check.Err(v.NodePublishVolume(v.t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: v.access,
	})))
	v.up = true
}

func (v *cutVolume) unpublish() {
	v.t.Helper()
	_, err := v.NodeUnpublishVolume(v.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	check.Must(v.t, err)
	check.Must(v.t, check.Err(v.NodeUnstageVolume(v.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})))
	v.up = false
}

// write writes to a block volume, and syncs it.
func (v *cutVolume) write() {
	v.t.Helper()
	content := v.noise(cutContent)
	v.publish()
	v.content = cutSum(content)
	v.call(cuts.Mark{Sets: facts{"content " + v.id: v.content}, Loose: true}, func() error {
		device := check.Value(os.OpenFile(v.target, os.O_WRONLY, 0))(v.t)
		defer func() { _ = device.Close() }()
		check.Must(v.t, check.Err(device.WriteAt(content, 0)))
		return device.Sync()
	})
}

func (l *cutLoad) noise(size int) []byte {
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(l.random.Uint32())
	}
	return content
}

// snapshot makes a snapshot, of a volume in use where the disk's filesystem shares data.
func (v *cutVolume) snapshot(name string, and facts) (id string) {
	v.t.Helper()
	if v.fs == "ext4" && v.up {
		v.unpublish()
	}
	named := cutID("snap", name)
	sets := facts{}.volume(named, v.size, v.content)
	for fact, value := range and {
		sets[fact+" "+named] = value
	}
	v.call(cuts.Mark{Sets: sets}, func() error {
		made, err := v.CreateSnapshot(v.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id})
		id = made.GetSnapshot().GetSnapshotId()
		sets.made(id)
		return err
	})
	return id
}

func (v *cutVolume) remove() {
	v.t.Helper()
	if v.up {
		v.unpublish()
	}
	v.call(cuts.Mark{Sets: facts{}.gone(v.id)}, func() error {
		_, err := v.DeleteVolume(v.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
		return err
	})
}

func (v *cutVolume) grow(size int64) {
	v.t.Helper()
	v.call(cuts.Mark{Sets: facts{}.volume(v.id, size, "")}, func() error {
		_, err := v.ControllerExpandVolume(v.t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
		return err
	})
	v.size = size
}

// volumes makes volumes, a snapshot, clones and a group, and removes most of them.
func (l *cutLoad) volumes(round string) {
	v := l.create("v"+round, 2*mib, rig.BlockAccess(), nil, cutSum(make([]byte, cutContent)))
	v.write()
	first := v.content
	snapshot := v.snapshot("s"+round, nil)
	v.write()
	v.grow(4 * mib)
	clone := l.create("c"+round, 3*mib, rig.BlockAccess(), &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshot},
	}}, first)
	group := l.group("g"+round, v, clone)
	l.call(cuts.Mark{Sets: facts{}.gone(snapshot)}, func() error {
		_, err := l.DeleteSnapshot(l.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
		return err
	})
	if l.fs == "ext4" && v.up {
		v.unpublish()
	}
	l.create("d"+round, 4*mib, rig.BlockAccess(), &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: v.id},
	}}, v.content)
	clone.remove()
	if round != "0" {
		group()
		v.remove()
	}
}

// group makes a snapshot of volumes at one moment.
func (l *cutLoad) group(name string, volumes ...*cutVolume) (remove func()) {
	l.t.Helper()
	named, sets, sources, members := cutID("group", name), facts{}, []string(nil), []string(nil)
	for _, v := range volumes {
		if l.fs == "ext4" && v.up {
			v.unpublish()
		}
		member := cutID(named, v.id)
		sources, members = append(sources, v.id), append(members, member)
		sets.volume(member, v.size, v.content)
	}
	slices.Sort(members)
	sets["group "+named] = strings.Join(members, " ")
	var id string
	l.call(cuts.Mark{Sets: sets}, func() error {
		made, err := l.CreateVolumeGroupSnapshot(l.t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: sources})
		id, members = made.GetGroupSnapshot().GetGroupSnapshotId(), nil
		for _, one := range made.GetGroupSnapshot().GetSnapshots() {
			members = append(members, one.GetSnapshotId())
		}
		sets.made(append(members, id)...)
		return err
	})
	return func() {
		l.t.Helper()
		sets := facts{"group " + named: "", "id " + named: ""}.gone(members...)
		l.call(cuts.Mark{Sets: sets}, func() error {
			_, err := l.DeleteVolumeGroupSnapshot(l.t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: members})
			return err
		})
	}
}

// pod makes snapshots of a volume with a filesystem, to which a pod writes and does not sync it.
func (l *cutLoad) pod(fs string) {
	v := l.create("p"+fs, 320*mib, rig.MountAccess(fs), nil, "")
	for round := range 2 {
		v.publish()
		check.Must(l.t, os.Mkdir(fmt.Sprintf("%s/%d", v.target, round), 0o755))
		for i := range 5 {
			check.Must(l.t, os.WriteFile(fmt.Sprintf("%s/%d/%d", v.target, round, i), l.noise(9000), 0o600))
		}
		sum := check.Value(treeSum(v.target))(l.t)
		id := v.snapshot("p"+fs+strconv.Itoa(round), facts{"frozen " + fs: sum})
		check.That(l.t, snapshots.Consistent(l.t, l.dir+"/driver", id), "%s is not consistent", id)
	}
}

// treeSum is a digest of the names and contents of all files.
func treeSum(dir string) (string, error) {
	var all strings.Builder
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path) //nolint:gosec // a test's own
		fmt.Fprintln(&all, strings.TrimPrefix(path, dir), cutSum(content))
		return err
	})
	return cutSum([]byte(all.String())), err
}

// backs makes a full backup and increments.
func (l *cutLoad) backs() {
	dir, base := l.dir+"/backup", []string(nil)
	check.Must(l.t, os.Mkdir(dir, 0o755))
	unix.Sync()
	v := l.create("b", 4*mib, rig.BlockAccess(), nil, cutSum(make([]byte, cutContent)))
	for i := range 4 {
		v.write()
		name := "b" + strconv.Itoa(i)
		id := v.snapshot(name, nil)
		l.call(cuts.Mark{Sets: facts{"backup " + name: fmt.Sprint(id, " ", v.size)}}, func() error {
			rig.Command(l.t, "/usr/local/bin/crust-backup", append([]string{
				"backup", id, "--from", snapshots.Image(l.dir+"/driver", id), "--file", dir + "/" + name, "--csi-socket", l.run + "/csi.sock",
			}, base...)...)
			return nil
		})
		base = []string{"--base-file", dir + "/" + name}
	}
}

// configures has a daemon accept configurations.
func (l *cutLoad) configures() {
	d := rig.NewDaemon(l.t)
	d.Programs, d.Accepted = "/usr/local/bin", l.dir+"/daemon/accepted.yaml"
	for i := range 6 {
		d.Extra = strings.Repeat(fmt.Sprintf("# of configuration %d\n", i), 600)
		mark := cuts.Mark{Sets: facts{"config accepted.yaml": cutSum([]byte(d.Config()))}}
		if i == 0 { // nothing says when the first is kept
			check.Must(l.t, l.marker.Put(mark))
			d.Start()
			continue
		}
		l.call(mark, func() error {
			path := d.Dir + "/config.yaml"
			check.Must(l.t, os.WriteFile(path+".new", []byte(d.Config()), 0o600))
			check.Must(l.t, os.Rename(path+".new", path))
			d.Signal(unix.SIGHUP)
			check.Eventually(l.t, "the configuration is accepted", func() bool { return strings.Count(d.Log(), "configuration reloaded") >= i })
			return nil
		})
	}
	d.Stop()
}
