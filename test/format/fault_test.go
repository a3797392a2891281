//go:build system

package format_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// tools gives a directory in which mkfs of one kind is a script around the real one, $real.
func tools(t testing.TB, fs, script string) func(*mkfs.Config) {
	t.Helper()
	program, err := exec.LookPath("mkfs." + fs)
	if err != nil {
		rig.Missing(t, "mkfs."+fs+" is not installed")
	}
	return standIns(t, map[string]string{"mkfs." + fs: "real=" + program + "\n" + script})
}

// held has mkfs say that it begins, and wait for the file taken. A confined program can
// write to no file: it has the times of one say its process.
func held(t testing.TB, dir string) (script string) {
	t.Helper()
	check.Must(t, os.WriteFile(dir+"/begun", nil, 0o600))
	check.Must(t, os.Chtimes(dir+"/begun", time.Time{}, time.Unix(0, 0)))
	_ = os.Remove(dir + "/taken")
	return "touch -c -d @$$ " + dir + "/begun; until [ -e " + dir + "/taken ]; do sleep 0.05; done\n" + `exec $real "$@"`
}

// waitBegun waits until mkfs was started, and returns its process.
func waitBegun(dir string) (pid int, err error) {
	err = check.Until(2*time.Minute, time.Millisecond, func() error {
		info, err := os.Stat(dir + "/begun")
		if err == nil && info.ModTime().Unix() == 0 {
			err = errors.New("not begun")
		}
		if err == nil {
			pid = int(info.ModTime().Unix())
		}
		return err
	})
	return pid, err
}

// killAfter kills a program that does not wait for taken, a while after it has begun.
func killAfter(dir string, while time.Duration) {
	if pid, err := waitBegun(dir); err == nil {
		time.Sleep(while)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// slice lets a process run for a moment at a time.
func slice(pid int) {
	for range 10 {
		_ = unix.Kill(pid, unix.SIGSTOP)
		time.Sleep(400 * time.Millisecond)
		_ = unix.Kill(pid, unix.SIGCONT)
		time.Sleep(time.Millisecond)
	}
}

func formatOnce(device string) int {
	f := mkfs.New(mkfs.Config{LockFile: os.Getenv("LOCK"), ToolDirs: strings.Split(os.Getenv("TOOLS"), ":")})
	fd, err := unix.Open(device, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	root := mkfs.Root{}
	if mode := os.Getenv("ROOT_MODE"); mode != "" {
		if _, err := fmt.Sscanf(mode, "%o", &root.Mode); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	if _, err := f.Prepare(context.Background(), mkfs.Request{Device: fd, Volume: "/v", Path: device, ID: os.Getenv("ID"), FSType: os.Getenv("FS"), Policy: volume.FormatHost, Root: root}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// daemon starts another process that formats the device.
func (r *testFormatter) daemon(device, fs string, env ...string) *exec.Cmd {
	r.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), asDaemon+"="+device, "FS="+fs, "LOCK="+r.conf.LockFile, "TOOLS="+strings.Join(r.conf.ToolDirs, ":"))
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	check.Must(r.t, cmd.Start())
	return cmd
}

// settled calls Prepare until the device is not busy any more.
func (r *testFormatter) settled(device, fs string) (formatted bool, err error) {
	r.t.Helper()
	for until := time.Now().Add(time.Minute); time.Now().Before(until); {
		formatted, err = r.prepare(device, fs, volume.FormatHost, false)
		if volume.KindOf(err) != volume.Busy {
			return formatted, err
		}
	}
	r.t.Fatalf("busy for ever: %v", err)
	return false, err
}

func (r *testFormatter) wantSettled(formatted bool, device, fs string) {
	r.t.Helper()
	got, err := r.settled(device, fs)
	check.That(r.t, err == nil && got == formatted, "afterwards: formatted %v: %v", got, err)
}

func TestDaemonIsKilledInTheMiddleOfMkfs(t *testing.T) {
	for _, fs := range filesystems {
		t.Run(fs, func(t *testing.T) {
			dir := t.TempDir()
			r := newFormatter(t, tools(t, fs, held(t, dir)))
			device, _ := r.blank()
			daemon := r.daemon(device, fs)
			mkfs := check.Value(waitBegun(dir))(t)
			check.Must(t, unix.Kill(mkfs, unix.SIGSTOP))
			check.Must(t, os.WriteFile(dir+"/taken", nil, 0o600))
			_ = daemon.Process.Kill()
			err := daemon.Wait()
			status, ok := daemon.ProcessState.Sys().(syscall.WaitStatus)
			check.Require(t, ok && status.Signaled(), "the daemon had ended before it was killed: %v", err)
			formatted, err := r.prepare(device, fs, volume.FormatHost, false)
			check.That(t, volume.KindOf(err) == volume.Busy, "while mkfs goes on: formatted %v: %v", formatted, err)
			var slices sync.WaitGroup
			slices.Go(func() { slice(mkfs) }) // longer than a Prepare waits for a lock
			defer slices.Wait()
			r.wantSettled(false, device, fs)
			mounts(t, device, fs)
		})
	}
}

func TestDaemonIsKilledAtEachPlace(t *testing.T) {
	for _, place := range []string{"format-before-mkfs", "format-after-mkfs"} {
		r := newFormatter(t, tools(t, "ext4", `exec $real "$@"`))
		device, _ := r.blank()
		_ = r.daemon(device, "ext4", "CRUST_FAILPOINTS="+place+"=kill").Wait()
		formatted, err := r.settled(device, "ext4")
		want := place == "format-before-mkfs"
		check.That(t, err == nil && formatted == want, "%s: formatted %v: %v", place, formatted, err)
		mounts(t, device, "ext4")
	}
}

// TestDaemonIsKilledBeforeTheRootMode: what mkfs.ext4 has made then is never handed over
// as it is. The next attempt that may write completes it.
func TestDaemonIsKilledBeforeTheRootMode(t *testing.T) {
	for mode, want := range map[uint32]string{0o2775: "2775 0", 0: "755 0"} { // without a mode the rule has changed
		t.Run(want, func(t *testing.T) {
			r := newFormatter(t, tools(t, "ext4", `exec $real "$@"`))
			device, backing := r.blank()
			_ = r.daemon(device, "ext4", "CRUST_FAILPOINTS=format-after-mkfs=kill", "ROOT_MODE=2775").Wait()
			r.root.Mode = mode
			r.refused(device, backing, "ext4", volume.FormatNever, false, volume.InUse, "its root directory lacks its mode", "read-write once")
			r.refused(device, backing, "ext4", volume.FormatHost, true, volume.InUse, "its root directory lacks its mode")
			r.refused(device, backing, "xfs", volume.FormatHost, false, volume.InUse, "holds ext4")
			r.wantSettled(false, device, "ext4")
			run(t, "", "e2fsck", "-fn", device)
			unix.Sync()
			before := hash(t, backing)
			for _, policy := range []volume.FormatPolicy{volume.FormatHost, volume.FormatNever} {
				r.want(false, device, "ext4", policy, false)
			}
			wantSame(t, backing, before, "a complete filesystem was written to")
			got := rootOf(t, device, "ext4")
			check.That(t, got == want, "mode and group of the root directory are %s, want %s", got, want)
		})
	}
}

// TestMkfsIsKilled shows that half a filesystem is never called a whole one.
func TestMkfsIsKilled(t *testing.T) {
	for _, fs := range filesystems {
		for _, after := range []time.Duration{1, 5, 10, 20} {
			t.Run(fmt.Sprint(fs, " after ", after*time.Millisecond), func(t *testing.T) {
				dir := t.TempDir()
				r := newFormatter(t, tools(t, fs, held(t, dir)))
				device, _ := r.blank()
				check.Must(t, os.WriteFile(dir+"/taken", nil, 0o600))
				go killAfter(dir, after*time.Millisecond)
				formatted, err := r.prepare(device, fs, volume.FormatHost, false)
				check.Require(t, formatted == (err == nil), "formatted %v: %v", formatted, err)
				if err == nil {
					mounts(t, device, fs) // it was faster
					return
				}
				again := newFormatter(t)
				formatted, err = again.prepare(device, fs, volume.FormatHost, false)
				if formatted {
					mounts(t, device, fs)
				}
				if !formatted && err == nil {
					// Killed after its last write: then it must be whole.
					mounts(t, device, fs)
				}
				t.Logf("afterwards: formatted %v: %v", formatted, err)
			})
		}
	}
}

func TestMkfsOutlivesItsCallerAndItsBound(t *testing.T) {
	dir := t.TempDir()
	r := newFormatter(t, tools(t, "ext4", held(t, dir)), func(c *mkfs.Config) { c.Timeout = 10 * time.Second })
	r.others = true
	device, _ := r.blank()
	check.Kind(t, check.Err(r.prepare(device, "ext4", volume.FormatHost, false)), volume.Timeout, "left running")
	check.Must(t, os.WriteFile(dir+"/taken", nil, 0o600))
	newFormatter(t, func(c *mkfs.Config) { c.LockFile = r.conf.LockFile }).wantSettled(false, device, "ext4")
	mounts(t, device, "ext4")

	r = newFormatter(t, tools(t, "xfs", held(t, dir)))
	device, _ = r.blank()
	fd := openPath(t, device)
	defer func() { _ = unix.Close(fd) }()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = waitBegun(dir)
		cancel()
		_ = os.WriteFile(dir+"/taken", nil, 0o600)
	}()
	formatted, err := r.f.Prepare(ctx, mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "xfs", Policy: volume.FormatHost})
	check.That(t, err == nil && formatted && ctx.Err() != nil, "the caller's end: formatted %v: %v", formatted, err)
	mounts(t, device, "xfs")
}

// TestWhatIsStillWrittenToIsKnown: also to another life of the daemon, for as long as a
// program writes, and for no other volume.
func TestWhatIsStillWrittenToIsKnown(t *testing.T) {
	dir := t.TempDir()
	r := newFormatter(t, tools(t, "ext4", held(t, dir)))
	r.others, r.id = true, "a driver/a volume"
	device, _ := r.blank()
	check.NoError(t, r.f.CheckWriting(r.id), "before the first look")
	daemon := r.daemon(device, "ext4", "ID="+r.id)
	check.Must(t, check.Err(waitBegun(dir)))
	locks := filepath.Dir(r.conf.LockFile)
	check.Must(t, unix.Mount(locks, locks, "", unix.MS_BIND, ""))
	check.Must(t, unix.Mount("", locks, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")) // volumes can go nevertheless
	for _, state := range []string{"alive", "killed"} {
		err := r.f.CheckWriting(r.id)
		check.That(t, volume.KindOf(err) == volume.Busy, "the daemon is %s, and mkfs writes: %v", state, err)
		check.NoError(t, r.f.CheckWriting("a driver/another volume"), "another volume")
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
	}
	check.Must(t, unix.Unmount(locks, 0))
	other, _ := r.blank()
	check.Kind(t, check.Err(r.prepare(other, "ext4", volume.FormatHost, false)), volume.Busy) // the volume at another device
	check.Must(t, os.WriteFile(dir+"/taken", nil, 0o600))
	r.wantSettled(false, device, "ext4")
	check.NoError(t, r.f.CheckWriting(r.id), "when mkfs has ended")
	mounts(t, device, "ext4")
}

func TestCallerWhoIsGone(t *testing.T) {
	r := newFormatter(t)
	device, backing := r.blank()
	before := hash(t, backing)
	fd := openPath(t, device)
	defer func() { _ = unix.Close(fd) }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	check.Kind(t, check.Err(r.f.Prepare(ctx, mkfs.Request{Device: fd, Volume: "/v", Path: device, FSType: "ext4", Policy: volume.FormatHost})), volume.Canceled)
	time.Sleep(50 * time.Millisecond)
	wantSame(t, backing, before, "formatted for nobody")
}

func TestManyAtOnceFormatOnce(t *testing.T) {
	for _, fs := range filesystems {
		r := newFormatter(t)
		other := newFormatter(t, func(c *mkfs.Config) { c.LockFile = r.conf.LockFile })
		r.others, other.others = true, true
		device, _ := r.blank()
		var done sync.WaitGroup
		var made atomic.Int32
		for i := range 6 {
			done.Go(func() {
				which := []*testFormatter{r, other}[i%2]
				formatted, err := which.settled(device, fs)
				check.That(t, err == nil, "%s: %v", fs, err)
				if formatted {
					made.Add(1)
				}
			})
		}
		done.Wait()
		check.That(t, made.Load() == 1, "%s: formatted %d times", fs, made.Load())
		mounts(t, device, fs)
	}
}

func TestManyDevicesAtOnce(t *testing.T) {
	r := newFormatter(t)
	r.others = true
	var done sync.WaitGroup
	for i := range 24 {
		device, _ := r.blank()
		done.Go(func() {
			r.want(true, device, filesystems[i%3], volume.FormatHost, false)
		})
	}
	done.Wait()
}

func TestUnreadableDeviceIsNotBlank(t *testing.T) {
	for _, left := range []int64{0, mib / 2, size - mib/2, size - 4096} {
		r := newFormatter(t)
		device, backing := r.blank()
		check.Must(t, os.Truncate(backing, left))
		for _, policy := range []volume.FormatPolicy{"host", "never"} {
			r.refused(device, backing, "ext4", policy, false, volume.Internal, "cannot be read at byte", "input/output error")
		}
	}
}

// TestFullStorage has the storage behind a thin device fill up while mkfs writes.
func TestFullStorage(t *testing.T) {
	for _, fs := range filesystems {
		for _, room := range []string{"16k", "128k", "1m", "2m", "4m", "8m"} {
			t.Run(fs+" in "+room, func(t *testing.T) {
				r := newFormatter(t)
				dir := rig.Tmpfs(t, "size="+room)
				backing := filepath.Join(dir, "image")
				check.Must(t, os.WriteFile(backing, nil, 0o600))
				check.Must(t, os.Truncate(backing, size))
				device := check.Value(loopdev.Attach(backing, loopdev.Options{}))(t)
				defer func() { _ = loopdev.Detach(device) }()
				formatted, err := r.prepare(device, fs, volume.FormatHost, false)
				t.Logf("formatted %v: %v", formatted, err)
				check.Require(t, formatted == (err == nil), "formatted %v: %v", formatted, err)
				if err == nil {
					return
				}
				check.Fails(t, check.Err(r.prepare(device, fs, volume.FormatHost, false))) // or what a failed mkfs left is taken
				check.Must(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=600m"))
				r.want(true, device, fs, volume.FormatHost, false)
				mounts(t, device, fs)
			})
		}
	}
}

func TestMkfsThatLies(t *testing.T) {
	for _, c := range []struct {
		name, script string
		says         string
		then         bool // the next Prepare formats
	}{
		{"does nothing", "exit 0", "does not hold what it made", true},
		{"fails at once", "echo 'no, \x1b[31mnever' >&2; exit 3", "exit code 3): no, [31mnever", true},
		{"fails at the end", `$real "$@"; exit 1`, "exit code 1", true},
		{"is killed at the end", `$real "$@"; ulimit -t 1; while :; do :; done`, "signal", true},
		{"makes another one", `shift $(($# - 1)); /usr/sbin/mkfs.xfs -q $1`, "found: xfs", false},
		{"makes one of its own", `shift $(($# - 1)); $real -q $1`, "does not hold what it made", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newFormatter(t, tools(t, "ext4", c.script))
			if strings.HasPrefix(c.name, "fails") {
				r.root.Mode = 0o2775
			}
			device, backing := r.blank()
			formatted, err := r.prepare(device, "ext4", volume.FormatHost, false)
			left, _ := os.ReadDir(filepath.Dir(r.conf.LockFile) + "/unfinished")
			check.Empty(t, left, "on record, although the device is blank again")
			check.Require(t, !formatted && volume.KindOf(err) == volume.Internal && strings.Contains(fmt.Sprint(err), c.says),
				"formatted %v: %v", formatted, err)
			unix.Sync()
			before := hash(t, backing)
			formatted, err = newFormatter(t).prepare(device, "ext4", volume.FormatHost, false)
			check.That(t, formatted == c.then, "next: formatted %v: %v", formatted, err)
			unix.Sync()
			check.That(t, c.then || before == hash(t, backing), "what was not ours was written over")
		})
	}
}

// takeOnceBegun takes the device when mkfs was started, and lets mkfs go on.
func takeOnceBegun(device, dir string) (fd int) {
	_, _ = waitBegun(dir)
	fd, _ = unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	_ = os.WriteFile(dir+"/taken", nil, 0o600)
	return fd
}

// TestSomebodyTakesTheDeviceFirst has another program use the moment between our look and mkfs.
func TestSomebodyTakesTheDeviceFirst(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		r := newFormatter(t, tools(t, fs, `for last; do :; done; $real -q $last; exec $real "$@"`))
		device, _ := r.blank()
		formatted, err := r.prepare(device, fs, volume.FormatHost, false)
		check.That(t, !formatted && strings.Contains(fmt.Sprint(err), "existing"), "%s: formatted %v: %v", fs, formatted, err)
		mounts(t, device, fs)
	}
	for _, fs := range filesystems {
		dir := t.TempDir()
		r := newFormatter(t, tools(t, fs, held(t, dir)))
		r.others = true
		device, _ := r.blank()
		taken := make(chan int, 1)
		go func() {
			taken <- takeOnceBegun(device, dir)
		}()
		formatted, err := r.prepare(device, fs, volume.FormatHost, false)
		held := <-taken
		check.That(t, !formatted && err != nil && held >= 0, "%s on a held device: formatted %v: %v", fs, formatted, err)
		_ = unix.Close(held)
		newFormatter(t).want(true, device, fs, volume.FormatHost, false)
	}
}
