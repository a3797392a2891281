//go:build system

package format_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/disk/superblock"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// smallOnLarge is a device of 300 MiB with an ext4 of 100 MiB and a file on it, as a
// snapshot restored into a larger volume is. prepare works on the image before.
func smallOnLarge(t *testing.T, prepare ...string) (device string) {
	t.Helper()
	backing := rig.Image(t, 100*mib)
	rig.Mkfs(t, "ext4", backing)
	run(t, "", "debugfs", "-w", "-R", "write /etc/hostname kept", backing)
	for _, command := range prepare {
		run(t, "", "debugfs", "-w", "-R", command, backing)
	}
	check.Must(t, os.Truncate(backing, size))
	return rig.Loop(t, backing, loopdev.Options{})
}

// wantGrown mounts the filesystem, which must have the file, and the size of its device or that of before.
func wantGrown(t *testing.T, device string, grown bool) {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, unix.Mount(device, dir, "ext4", 0, ""))
	defer func() { _ = unix.Unmount(dir, 0) }()
	check.Must(t, check.Err(os.Stat(filepath.Join(dir, "kept"))))
	var st unix.Statfs_t
	check.Must(t, unix.Statfs(dir, &st))
	got := int64(st.Blocks) * st.Bsize
	check.That(t, got >= 250*mib == grown && (grown || got <= 100*mib), "the filesystem of %s has %d bytes, grown: %v", device, got, grown)
}

func (r *testFormatter) growing(device string, change func(*mkfs.Request)) error {
	fd := openPath(r.t, device)
	defer func() { _ = unix.Close(fd) }()
	request := mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "ext4", Policy: volume.FormatNever, Grow: true}
	change(&request)
	_, err := r.f.Prepare(r.t.Context(), request)
	return err
}

func TestARestoredFilesystemIsGrownBeforeItIsHandedOver(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	core, said := observer.New(zap.WarnLevel)
	r := newFormatter(t, func(c *mkfs.Config) { c.Log = zap.New(core) })
	device := smallOnLarge(t)
	for range 2 { // then it is as large as its device, and has the damage and error state of an interrupted resize2fs
		check.Must(t, r.growing(device, func(*mkfs.Request) {}))
		check.Run(t, exec.Command("e2fsck", "-f", "-n", device))
		wantGrown(t, device, true)
		run(t, "set_inode_field / links_count 9\nset_super_value state 2", "debugfs", "-w", "-f", "/dev/stdin", device)
	}
	for _, q := range []mkfs.Request{{FSType: "xfs", Grow: true}, {FSType: "btrfs", Grow: true}, {FSType: "xfs"}} {
		backing := rig.Image(t, size)
		rig.Mkfs(t, q.FSType, backing)
		check.Must(t, os.Truncate(backing, 2*size))
		check.Must(t, r.growing(rig.Loop(t, backing, loopdev.Options{}), func(asked *mkfs.Request) { asked.FSType, asked.Grow = q.FSType, q.Grow }))
		check.Equal(t, len(said.TakeAll()) > 0, q.Grow, "the log says that a larger %s stays as it is", q.FSType)
	}
}

// TestWhatMustNotBeGrownStaysAsItIs: and no program is run on it, whatever its label is.
func TestWhatMustNotBeGrownStaysAsItIs(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	for name, change := range map[string]func(*mkfs.Request){
		"a rule says so":     func(q *mkfs.Request) { q.Grow = false },
		"a read-only volume": func(q *mkfs.Request) { q.ReadOnly = true },
	} {
		t.Run(name, func(t *testing.T) {
			device := smallOnLarge(t, "set_super_value volume_name crust-unfinished")
			dir := t.TempDir()
			_ = held(t, dir)
			r := newFormatter(t, standIns(t, map[string]string{
				"e2fsck": "touch -c " + dir + "/begun", "resize2fs": "touch -c " + dir + "/begun", "debugfs": "touch -c " + dir + "/begun",
			}))
			r.root.Mode = 0o2775
			check.Must(t, r.growing(device, func(q *mkfs.Request) { q.Policy, q.Root = volume.FormatHost, r.root; change(q) }))
			check.That(t, check.Value(os.Stat(dir+"/begun"))(t).ModTime().Unix() == 0, "a program was run on it")
			wantGrown(t, device, false)
		})
	}
}

// TestADamagedFilesystemKeepsNoPodWaiting: what e2fsck does not repair by itself is handed over as it is.
func TestADamagedFilesystemKeepsNoPodWaiting(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	device := smallOnLarge(t, "clri <2>") // no root directory
	for range 2 {                         // e2fsck leaves the error state
		check.Must(t, newFormatter(t).growing(device, func(*mkfs.Request) {})) // or a filesystem that cannot be grown is refused
	}
	file := check.Value(os.Open(device))(t)
	defer func() { _ = file.Close() }()
	super, err := superblock.Read(file, "ext4")
	check.That(t, err == nil && super.Bytes <= 100*mib, "it was grown: %+v, %v", super, err)
}

// standIns puts scripts in the place of programs.
func standIns(t testing.TB, scripts map[string]string) func(*mkfs.Config) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	return func(c *mkfs.Config) { c.ToolDirs = []string{dir, "/usr/sbin", "/usr/bin", "/sbin", "/bin"} }
}

// TestACheckThatTakesTooLongIsEnded: e2fsck parses what a tenant wrote.
func TestACheckThatTakesTooLongIsEnded(t *testing.T) {
	rig.Need(t, "resize2fs", "debugfs")
	r := newFormatter(t, standIns(t, map[string]string{"e2fsck": "exec sleep 600"}), func(c *mkfs.Config) { c.Timeout = 16 * time.Second })
	device := smallOnLarge(t)
	began := time.Now()
	check.Must(t, r.growing(device, func(*mkfs.Request) {}))
	check.That(t, time.Since(began) >= 7*time.Second, "e2fsck was not waited for")
	wantGrown(t, device, false)
}

// TestACheckThatCannotBeKilledKeepsNoOtherVolume: nobody sees the end of a process that another
// one traces, as if the kernel did not let it end.
func TestACheckThatCannotBeKilledKeepsNoOtherVolume(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs", "perl")
	dir := t.TempDir()
	r := newFormatter(t, standIns(t, map[string]string{"e2fsck": held(t, dir)}), func(c *mkfs.Config) { c.Timeout = 20 * time.Second })
	devices := []string{smallOnLarge(t), smallOnLarge(t)}
	done := check.Begin(func() error { return r.growing(devices[0], func(*mkfs.Request) {}) })
	const seize = `$| = 1; syscall($ARGV[0] + 0, 0x4206, $ARGV[1] + 0, 0, 0) == 0 or die $!; print "seized"; sleep 600`
	tracer := exec.Command("perl", "-e", seize, fmt.Sprint(unix.SYS_PTRACE), fmt.Sprint(check.Value(waitBegun(dir))(t)))
	said, err := tracer.StdoutPipe()
	check.Must(t, errors.Join(err, tracer.Start()))
	end := sync.OnceFunc(func() { _ = errors.Join(tracer.Process.Kill(), tracer.Wait()) })
	defer end()
	check.Must(t, check.Err(io.ReadFull(said, make([]byte, len("seized")))))
	err = <-done
	check.That(t, volume.KindOf(err) == volume.Timeout, "e2fsck was ended: %v", err)
	other := newFormatter(t, func(c *mkfs.Config) { c.LockFile = r.conf.LockFile })
	for _, device := range []string{devices[1], devices[0]} {
		check.Must(t, other.growing(device, func(*mkfs.Request) {}))
		wantGrown(t, device, true)
		end()
	}
}

// TestOneCheckAtATime: each may take much memory, and the caller of one that waits may go.
// No one waits for the growth of another one, which may take long.
func TestOneCheckAtATime(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	first, second, resizing := t.TempDir(), t.TempDir(), t.TempDir()
	checking := func(dir string) *testFormatter {
		return newFormatter(t, standIns(t, map[string]string{"e2fsck": "real=/usr/sbin/e2fsck\n" + held(t, dir),
			"resize2fs": map[string]string{first: "real=/usr/sbin/resize2fs\n" + held(t, resizing), second: `exec /usr/sbin/resize2fs "$@"`}[dir]}))
	}
	one, other := checking(first), checking(second)
	other.conf.LockFile = one.conf.LockFile
	other.f = mkfs.New(other.conf)
	devices := []string{smallOnLarge(t), smallOnLarge(t)}
	done := check.Begin(func() error { return one.growing(devices[0], func(*mkfs.Request) {}) })
	check.Must(t, check.Err(waitBegun(first)))
	ctx := check.Within(t, time.Second)
	fd := openPath(t, devices[1])
	defer func() { _ = unix.Close(fd) }()
	_, err := other.f.Prepare(ctx, mkfs.Request{Device: fd, Volume: "/v", Path: devices[1], FSType: "ext4", Policy: volume.FormatNever, Grow: true})
	info, statErr := os.Stat(second + "/begun")
	check.That(t, volume.KindOf(err) == volume.Timeout && statErr == nil && info.ModTime().Unix() == 0,
		"while another one is checked: %v, %v", err, statErr)
	for _, dir := range []string{first, second} {
		check.Must(t, os.WriteFile(dir+"/taken", nil, 0o600))
	}
	check.Must(t, check.Err(waitBegun(resizing)))
	check.Must(t, other.growing(devices[1], func(*mkfs.Request) {}))
	check.Must(t, os.WriteFile(resizing+"/taken", nil, 0o600))
	check.Must(t, <-done)
	for _, device := range devices {
		wantGrown(t, device, true)
	}
}

// TestAGrowthThatIsCutOff: the next attempt repairs the filesystem and grows it. One that
// e2fsck does not repair by itself is handed over to nobody, until a person has done it.
func TestAGrowthThatIsCutOff(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	for _, after := range []time.Duration{0, 1, 2, 4, 8, 12, 16, 20} {
		t.Run(fmt.Sprint("killed after ", after*time.Millisecond), func(t *testing.T) {
			dir := t.TempDir()
			device := smallOnLarge(t)
			script := "real=/usr/sbin/resize2fs\n" + held(t, dir)
			check.Must(t, os.WriteFile(dir+"/taken", nil, 0o600))
			go killAfter(dir, after*time.Millisecond)
			cut := newFormatter(t, standIns(t, map[string]string{"resize2fs": script}))
			if err := cut.growing(device, func(*mkfs.Request) {}); err != nil {
				wantCutOff(t, err)
				byHand(device)
			}
			again := newFormatter(t, func(c *mkfs.Config) { c.LockFile = cut.conf.LockFile })
			check.Must(t, again.growing(device, func(*mkfs.Request) {}))
			wantGrown(t, device, true)
			run(t, "", "e2fsck", "-f", "-n", device)
		})
	}
	device := smallOnLarge(t)
	r := newFormatter(t, standIns(t, map[string]string{"resize2fs": "debugfs -w -R 'clri <2>' $1; exit 1"}))
	for _, grow := range []bool{true, true, false} {
		wantCutOff(t, r.growing(device, func(q *mkfs.Request) { q.Grow = grow }))
	}
	check.Must(t, newFormatter(t).growing(device, func(*mkfs.Request) {})) // after a reboot
	byHand(device)
	r = newFormatter(t, func(c *mkfs.Config) { c.LockFile = r.conf.LockFile })
	for _, grow := range []bool{false, true, true} {
		check.Must(t, r.growing(device, func(q *mkfs.Request) { q.Grow = grow }))
		check.Equal(t, len(check.Value(os.ReadDir(filepath.Dir(r.conf.LockFile)+"/unfinished"))(t)), 0, "on record after it was repaired by hand")
	}
}

func wantCutOff(t *testing.T, err error) {
	t.Helper()
	check.Require(t, volume.KindOf(err) == volume.InUse && strings.Contains(fmt.Sprint(err), "growth was cut off") && strings.Contains(err.Error(), "/unfinished/"),
		"damaged while it grew: %v", err)
}

// byHand does what the error says. It ends with 1, as it repairs something.
func byHand(device string) { _ = exec.Command("e2fsck", "-f", "-y", device).Run() }

// TestACraftedFilesystemTakesOnlySoMuchMemory has a hundred files claim the same blocks, each
// pair of which e2fsck notes: half a gigabyte for a filesystem of 100 MiB.
func TestACraftedFilesystemTakesOnlySoMuchMemory(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs")
	backing := rig.Image(t, 100*mib)
	run(t, "", "mkfs.ext4", "-q", "-b", "1024", "-N", "2048", "-O", "^metadata_csum,^uninit_bg", backing)
	commands := "write /dev/null file\nfallocate <12> 0 79999\n"
	for inode := range 100 {
		commands += fmt.Sprintf("copy_inode <12> <%d>\n", 13+inode)
	}
	run(t, commands, "debugfs", "-w", "-f", "/dev/stdin", backing)
	check.Must(t, os.Truncate(backing, size))
	core, said := observer.New(zap.WarnLevel)
	r := newFormatter(t, func(c *mkfs.Config) { c.Log = zap.New(core) })
	check.Must(t, r.growing(rig.Loop(t, backing, loopdev.Options{}), func(*mkfs.Request) {}))
	entries := said.All()
	check.That(t, len(entries) == 1 && strings.Contains(fmt.Sprint(entries[0].ContextMap()["reason"]), "e2fsck"), "it was not checked: %v", entries)
	var used unix.Rusage
	check.Must(t, unix.Getrusage(unix.RUSAGE_CHILDREN, &used))
	most := used.Maxrss << 10
	check.That(t, most >= 64*mib && most <= 200*mib, "a program took %d MiB", most/mib)
}

// confined complains about what a program of the node may do beside its work.
const confined = `until [ "$(ulimit -Hn) $(ulimit -Hc)" = "256 0" ] && [ "$(ulimit -Hf)" != unlimited ]; do :; done
LIMITED && until [ "$(cat /proc/self/oom_score_adj)" = 1000 ]; do :; done # the last that is set
bad() { echo "$*" >&2; }
while read -r key value _; do
	case $key in
	CapInh:|CapPrm:|CapEff:|CapAmb:) want=0000000000000000 ;;
	NoNewPrivs:) want=1 ;;
	Seccomp:) want=2 ;;
	*) continue ;;
	esac
	[ "$value" = $want ] || bad "$key $value"
done </proc/self/status
(: </etc/shadow) 2>/dev/null && bad "reads /etc/shadow"
(: <OTHER) 2>/dev/null && bad "reads another device"
(: >DIR/begun) 2>/dev/null && bad "writes to a file"
(: <>/proc/self/fd/3) || bad "cannot open its device"
chmod 0600 DIR/begun 2>/dev/null && bad "changes a mode"
kill -0 1 2>/dev/null && bad "sends signals"
for owner in 8,1 10,1 '15,$ex'; do perl -e '$ex = pack("ii", 1, 1); pipe(R, W); exit !fcntl(R, '$owner')' && bad "has the kernel send signals: $owner"; done
perl -e '$lock = pack("ssx4qqix4", 2, 0, 0, 0, 0); open(L, "+<&=4"); exit !(fcntl(L, 37, $lock) || fcntl(L, 6, $lock))' && bad "changes locks"
perl -e 'open(F, "</usr/bin/true"); exit !(ioctl(F, 0x40086602, $none = pack("q", 0)) || $! != 1)' && bad "changes the flags of a file"
unshare --user true 2>/dev/null && bad "makes a user namespace"
logger --socket /dev/log --socket-errors=on x 2>&1 | grep -q 'not permitted' || bad "has sockets"
LIMITED && dd if=/proc/self/fd/3 of=/dev/null bs=200M count=1 2>/dev/null && bad "takes 200 MiB for a small filesystem"
is() { [ "$1" != "$2" ] && echo true || echo false; }
[ "$(is $(ulimit -Hv) unlimited) $(is $(ulimit -Ht) unlimited)" = "LIMITED LIMITED" ] || bad "memory $(ulimit -Hv), time $(ulimit -Ht)"
LIMITED || [ "$(cat /proc/self/oom_score_adj)" != 1000 ] || bad "is killed first"
`

// TestProgramsAreConfined: they parse what a tenant wrote. No limit ends those that must not end half-way.
func TestProgramsAreConfined(t *testing.T) {
	rig.Need(t, "e2fsck", "resize2fs", "debugfs", "unshare", "logger", "perl")
	dir := t.TempDir()
	_ = held(t, dir)
	other, _ := newFormatter(t).blank()
	for _, name := range []string{"blkid", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "debugfs", "e2fsck", "resize2fs"} {
		t.Run(name, func(t *testing.T) {
			core, said := observer.New(zap.WarnLevel)
			fsType, isMkfs := strings.CutPrefix(name, "mkfs.")
			script := strings.NewReplacer("OTHER", other, "DIR", dir, "LIMITED", fmt.Sprint(!isMkfs && name != "resize2fs")).Replace(confined)
			r := newFormatter(t, standIns(t, map[string]string{name: script + "echo reported >&2; exit 77"}), func(c *mkfs.Config) { c.Log = zap.New(core) })
			var err error
			if isMkfs || name == "debugfs" {
				device, _ := r.blank()
				r.root.Mode = 0o2775
				_, err = r.prepare(device, map[bool]string{true: fsType, false: "ext4"}[isMkfs], volume.FormatHost, false)
			} else {
				err = r.growing(smallOnLarge(t), func(*mkfs.Request) {})
			}
			text := fmt.Sprint(err)
			for _, entry := range said.All() {
				text += fmt.Sprint(entry.ContextMap()["reason"])
			}
			check.That(t, strings.Contains(text, "77): reported"), "it is not confined: %s", text)
		})
	}
}
