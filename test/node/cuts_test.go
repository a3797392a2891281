//go:build system

package node

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/backup"
	"github.com/crust-proxy/crust-proxy/reference/driver"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/node/cuts"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/snapshots"
)

// TestPowerCuts: whenever the power is cut, all that was acknowledged is there afterwards, and nothing half-made is. A
// machine works on disks whose every write is logged, and each log is cut at each flush, at each acknowledgement and at
// random writes. A disk loses any part of what it has in its cache, and tears one write apart.
func TestPowerCuts(t *testing.T) {
	self := check.Value(os.Executable())(t)
	files := map[string]string{self: program}
	for _, name := range []string{"crust-driver", "crust-backup", "crust-proxy"} {
		files[rig.Program(t, name)] = "/usr/local/bin/" + name
	}
	dir, disks, args := t.TempDir(), make(map[string]*cuts.Disk), []string(nil)
	for fs := range cutFS {
		disk := filepath.Join(dir, fs)
		disks[fs] = makeCutDisk(t, disk, fs)
		args = append(args, loggedDisk(fs, disk, lastSlot-len(disks))...)
	}
	m := install(t, "trixie", files, args...)
	m.inside("disks")
	m.qemu.Kill()
	for _, fs := range slices.Sorted(maps.Keys(disks)) {
		t.Run(fs, func(t *testing.T) { cutAll(t, fs, disks[fs], filepath.Join(dir, fs+".log")) })
	}
}

func makeCutDisk(t *testing.T, path, fs string) *cuts.Disk {
	t.Helper()
	check.Must(t, os.WriteFile(path, nil, 0o600))
	check.Must(t, os.WriteFile(path+".log", nil, 0o600))
	check.Must(t, os.Truncate(path, cutDisk-cuts.MarkSpace))
	rig.Mkfs(t, fs, path)
	check.Must(t, os.Truncate(path, cutDisk))
	disk := check.Value(cuts.OpenDisk(path))(t)
	t.Cleanup(func() { check.Must(t, disk.Close()) })
	return disk
}

// lastSlot is after the slots of such disks on the machine's bus: the disk that it boots from has to come first.
const lastSlot = 30

// loggedDisk are QEMU's arguments for a disk of which each write and each flush is logged.
func loggedDisk(name, path string, slot int) (args []string) {
	for _, file := range []string{"file", "log"} {
		args = append(args, "-blockdev", fmt.Sprintf("driver=file,node-name=%s-%s,cache.no-flush=on,filename=%s", name, file,
			map[string]string{"file": path, "log": path + ".log"}[file]))
	}
	return append(args, "-blockdev", fmt.Sprintf("driver=blklogwrites,node-name=%[1]s,file=%[1]s-file,log=%[1]s-log", name),
		"-device", fmt.Sprintf("virtio-blk-pci,drive=%[1]s,serial=cut-%[1]s,discard=off,write-zeroes=off,addr=%[2]x", name, slot))
}

// randomCuts is at how many writes the power is cut, besides flushes and acknowledgements.
func randomCuts() int {
	if rig.Soak() {
		return 1500
	}
	return 200
}

// mostFaults ends the search for more.
const mostFaults = 5

func cutAll(t *testing.T, fs string, disk *cuts.Disk, path string) {
	log := check.Value(cuts.OpenLog(path))(t)
	marks := check.Value(cuts.Marks(log, cutDisk))(t)
	r := rand.New(rand.NewPCG(rig.Seed(t), 0))
	points, faults, expected, next := cuts.Points(log, marks, randomCuts(), r), 0, new(cuts.Expected), 0
	image, err := os.OpenFile(filepath.Join(rig.Tmpfs(t, ""), "image"), os.O_RDWR|os.O_CREATE, 0o600)
	check.Must(t, errors.Join(err, image.Truncate(cutDisk)))
	t.Cleanup(func() { _ = image.Close() })
	l := &cutLook{t: t, fs: fs, image: image.Name(), dir: t.TempDir(), run: t.TempDir()}
	start := time.Now()
	for _, point := range points {
		for ; next < point; next++ {
			if mark, is := marks[next]; is {
				expected.Add(mark)
			}
		}
		check.Must(t, disk.Advance(log, point))
		check.Must(t, disk.Cut(r, image))
		if found := l.look(expected); len(found) > 0 {
			faults++
			t.Errorf("cut at %d of %d writes:\n%s", point, len(log.Entries), strings.Join(found, "\n"))
		}
		if faults == mostFaults {
			break
		}
	}
	t.Logf("%d cuts in %v, %d writes and flushes, %d marks: %d faults", len(points), time.Since(start), len(log.Entries), len(marks), faults)
}

// cutLook looks at disks after the power was cut.
type cutLook struct {
	t                   *testing.T
	fs, image, dir, run string
	ids                 map[string]string // whole ids, by cutName
	found               map[string]string
	faults              []string
}

// look mounts a disk as after a boot, starts the driver on it, and compares all with what is expected.
func (l *cutLook) look(expected *cuts.Expected) []string {
	l.ids, l.found, l.faults = make(map[string]string), make(map[string]string), nil
	device := check.Value(loopdev.Attach(l.image, loopdev.Options{}))(l.t)
	defer func() { check.Must(l.t, loopdev.Detach(device)) }()
	check.Must(l.t, fsops.Forget(device, l.fs))
	if err := unix.Mount(device, l.dir, l.fs, 0, ""); err != nil {
		return []string{fmt.Sprintf("the disk cannot be mounted: %v", err)}
	}
	// Whoever looks through the machine's loop devices or processes may be in a file on it for a moment.
	defer func() { check.Succeeds(l.t, "unmount", func() error { return unix.Unmount(l.dir, 0) }) }()
	if err := l.driver(); err != nil {
		l.faults = append(l.faults, err.Error())
	}
	l.contents(expected)
	return append(l.faults, expected.Compare(l.found)...)
}

// driver starts the driver, which clears away what it had begun, and asks it for all that it has.
func (l *cutLook) driver() error {
	config := driver.Config{
		Endpoint: l.run + "/csi.sock", DataDir: l.dir + "/driver", NodeID: "node", Name: driver.DefaultName, FreezeLimit: time.Second, Log: zap.NewNop(),
	}
	d, err := driver.New(config)
	if err != nil {
		return err
	}
	defer check.Running(l.t, d.Run)()
	conn, err := rig.Connect(config.Endpoint)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	check.Must(l.t, check.Until(time.Minute, time.Millisecond, func() error { return dialable(config.Endpoint) }))
	volumes, err := csi.NewControllerClient(conn).ListVolumes(l.t.Context(), &csi.ListVolumesRequest{})
	if err != nil {
		return err
	}
	for _, one := range volumes.GetEntries() {
		l.listed(one.GetVolume().GetVolumeId(), one.GetVolume().GetCapacityBytes())
	}
	taken, err := csi.NewControllerClient(conn).ListSnapshots(l.t.Context(), &csi.ListSnapshotsRequest{})
	if err != nil {
		return err
	}
	groups := make(map[string][]string)
	for _, one := range taken.GetEntries() {
		l.listed(one.GetSnapshot().GetSnapshotId(), one.GetSnapshot().GetSizeBytes())
		if group := one.GetSnapshot().GetGroupSnapshotId(); group != "" {
			groups[group] = append(groups[group], one.GetSnapshot().GetSnapshotId())
		}
	}
	if records, _ := filepath.Glob(config.DataDir + "/groups/*.json"); len(records) != len(groups) {
		l.faults = append(l.faults, fmt.Sprintf("there are the records %q of the groups %v", records, groups))
	}
	for id, members := range groups {
		if _, err := csi.NewGroupControllerClient(conn).GetVolumeGroupSnapshot(l.t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id}); err != nil {
			l.faults = append(l.faults, fmt.Sprintf("the group %s has the snapshots %q: %v", id, members, err))
		}
		l.ids[cutName(id)] = id
		l.found["group "+cutName(id)] = cutName(strings.Join(members, " "))
	}
	return nil
}

func dialable(socket string) error {
	conn, err := net.Dial("unix", socket)
	if err == nil {
		err = conn.Close()
	}
	return err
}

// listed is a volume or a snapshot that the driver has.
func (l *cutLook) listed(id string, size int64) {
	named := cutName(id)
	l.ids[named] = id
	l.found["size "+named] = strconv.FormatInt(size, 10)
	if info, err := os.Stat(snapshots.Image(l.dir+"/driver", id)); err == nil {
		l.found["image "+named] = strconv.FormatInt(info.Size(), 10)
	}
}

// contents looks into the files.
func (l *cutLook) contents(expected *cuts.Expected) {
	data := l.dir + "/driver"
	images, _ := filepath.Glob(data + "/images/*")
	records, _ := filepath.Glob(data + "/volumes/*.json")
	left, _ := filepath.Glob(data + "/*/*.new")
	if len(images) != len(records) || len(left) > 0 {
		l.faults = append(l.faults, fmt.Sprintf("there are %d images of %d records, and %q", len(images), len(records), left))
	}
	for _, named := range expected.Named("id") {
		l.found["id "+named] = l.ids[named]
	}
	for _, named := range expected.Named("content") {
		if file, err := os.Open(snapshots.Image(data, l.ids[named])); err == nil {
			content := make([]byte, cutContent)
			_, _ = file.ReadAt(content, 0) // what is missing stays zero
			l.found["content "+named] = cutSum(content)
			_ = file.Close()
		}
	}
	for _, fs := range []string{"ext4", "xfs"} {
		for _, named := range expected.Named("frozen " + fs) {
			l.frozen(fs, named)
		}
	}
	l.backups(expected)
	if raw, err := os.ReadFile(l.dir + "/daemon/accepted.yaml"); err == nil {
		l.found["config accepted.yaml"] = cutSum(raw)
	}
}

// frozen looks at a filesystem without its log.
func (l *cutLook) frozen(fs, named string) {
	image := snapshots.Image(l.dir+"/driver", l.ids[named])
	if _, err := os.Stat(image); err != nil {
		return
	}
	sum, err := "", error(nil)
	if failed := snapshots.AsItIs(l.t, image, fs, func(dir string) { sum, err = treeSum(dir) }); failed != nil || err != nil {
		sum = fmt.Sprint(failed, err)
	}
	l.found["frozen "+fs+" "+named] = sum
}

// backups checks those that have their names, with all before them.
func (l *cutLook) backups(expected *cuts.Expected) {
	var chain []string
	for _, name := range expected.Named("backup") {
		path := l.dir + "/backup/" + name
		if _, err := os.Stat(path); err != nil {
			continue
		}
		chain = append(chain, path)
		made, err := backup.Check(l.t.Context(), chain)
		if err != nil {
			l.found["backup "+name] = err.Error()
			continue
		}
		l.found["backup "+name] = fmt.Sprint(made.Snapshot, " ", made.Size)
	}
}
