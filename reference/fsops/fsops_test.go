package fsops

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func places(t *testing.T) (Freezer, int) {
	t.Helper()
	f := Freezer{Dir: t.TempDir() + "/frozen"}
	dir := check.Value(f.open())(t)
	t.Cleanup(func() { _ = dir.Close() })
	return f, fdOf(dir)
}

// TestThawThatHangs does not keep the other filesystems frozen.
func TestThawThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goes := make(chan struct{})
		defer close(goes)
		began := time.Now()
		keys, next, err := thawAll([]string{"hangs", "b", "a", "waits", "fails"}, func(name string) (string, time.Duration, error) {
			switch name {
			case "hangs":
				<-goes
				return "", 0, nil
			case "waits":
				return "", time.Minute, nil
			case "fails":
				return "", 0, errors.New("broken")
			}
			time.Sleep(time.Second)
			return "key of " + name, 0, nil
		})
		took := time.Since(began)
		check.That(t, took == thawTime && slices.Equal(keys, []string{"key of a", "key of b"}) && next == nextTry,
			"%q after %v, next after %v", keys, took, next)
		check.That(t, err != nil && strings.Contains(err.Error(), "thaw hangs if its time is over: it hangs") && strings.Contains(err.Error(), "thaw fails"),
			"got %v", err)
	})
}

func TestRecordIsKeptLockedAndForgotten(t *testing.T) {
	f, at := places(t)
	first := check.Value(lockRecord(at, "device-1-2", time.Second))(t)
	check.Is(t, check.Err(first.read()), fs.ErrNotExist) // a new record
	want := state{Key: "key", Token: "token", Deadline: 5, Frozen: true, Watchdogs: []process.Process{{PID: 1, Start: 2}}}
	check.Must(t, errors.Join(first.write(&state{Key: "before"}), first.write(&want)))
	got, err := first.read()
	check.That(t, err == nil && got.Key == want.Key && got.Token == want.Token && got.Frozen && got.Watchdogs[0] == want.Watchdogs[0],
		"%+v, %v", got, err)
	check.Is(t, check.Err(lockRecord(at, "device-1-2", 20*time.Millisecond)), errLocked) // a locked record
	// Whoever waits gets a record of that name that is there.
	taken := make(chan *record)
	go func() {
		r, _ := lockRecord(at, "device-1-2", time.Minute)
		taken <- r
	}()
	time.Sleep(20 * time.Millisecond)
	first.remove()
	first.close()
	second := <-taken
	check.Must(t, second.write(&want))
	second.removeEmpty()
	check.NoError(t, check.Err(second.read()), "a record that is not empty was removed")
	second.remove()
	second.close()
	left, err := os.ReadDir(f.Dir)
	check.That(t, err == nil && len(left) == 0, "left: %v, %v", left, err)
}

func TestEndEndsTheRightProcess(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	check.Must(t, cmd.Start())
	is, err := process.Of(cmd.Process.Pid)
	check.Require(t, err == nil && is.Lives(), "%v, %v", is, err)
	end([]process.Process{{PID: is.PID, Start: is.Start + 1}})
	check.That(t, is.Lives(), "a process of another start was ended")
	end([]process.Process{is, {PID: 1 << 22, Start: 1}})
	check.Fails(t, cmd.Wait(), unix.SIGTERM.String()) // or it was not told to end
	check.That(t, !is.Lives(), "it is alive after its end")
}

// TestWatchdogThatEndsAtOnce: its end is not the sandbox's, whose binding would be dropped.
func TestWatchdogThatEndsAtOnce(t *testing.T) {
	for range 20 { // it has ended when it is looked at, or not yet
		_, err := Freezer{Watchdog: []string{"/bin/true"}}.arm(os.Stdin, os.Stdin, "device-1-2", new(state))
		check.That(t, err != nil && !errors.Is(err, process.ErrEnded), "got %v", err)
	}
}

func TestGroupsWithACopyOfTheSuperblock(t *testing.T) {
	var have []int64
	for group := range int64(130) {
		if hasSuper(group) {
			have = append(have, group)
		}
	}
	want := []int64{0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125}
	check.That(t, slices.Equal(have, want), "%v instead of %v", have, want)
}

func TestBlankDeviceHasNoSuperblock(t *testing.T) {
	super, err := readExt(bytes.NewReader(make([]byte, 4096)))
	check.That(t, super == nil && err == nil, "%+v, %v", super, err)
	check.Fails(t, check.Err(readExt(bytes.NewReader(make([]byte, 1500))))) // or half a superblock is taken
}

// tree makes that many directories below a new one, which it opens.
func tree(t *testing.T, count int, name func(i int) string) int {
	t.Helper()
	root := t.TempDir()
	for i := range count {
		check.Must(t, os.MkdirAll(filepath.Join(root, name(i)), 0o700))
	}
	dir := check.Value(os.Open(root))(t)
	t.Cleanup(func() { _ = dir.Close() })
	return fdOf(dir)
}

// measured is a context that looks at the memory in use when it is asked.
type measured struct {
	context.Context //nolint:containedctx // it is one
	asked           int
	first, most     uint64
}

func (m *measured) Err() error {
	if m.asked++; m.asked < 10 || m.asked%200 == 0 {
		runtime.GC()
		var is runtime.MemStats
		runtime.ReadMemStats(&is)
		if m.first == 0 {
			m.first = is.HeapAlloc
		}
		m.most = max(m.most, is.HeapAlloc)
	}
	return m.Context.Err()
}

// TestWideDirectoryTakesNoMemory: a workload can make millions of directories, and
// crust-runc is in the control group of its shim.
func TestWideDirectoryTakesNoMemory(t *testing.T) {
	root := tree(t, 4_000, func(i int) string { return fmt.Sprintf("%0250d", i) })
	ctx := &measured{Context: t.Context()}
	changed, err := ApplyGroup(ctx, root, uint32(os.Getegid()), volume.GroupAlways)
	check.That(t, err == nil && changed == 4_001, "%d changed: %v", changed, err)
	check.That(t, ctx.most < ctx.first+1<<19, "%d bytes in use, and %d at first", ctx.most, ctx.first)
}

// TestDeepTreeIsWalkedToItsEnd: directories that were closed on the way down go on where they were.
func TestDeepTreeIsWalkedToItsEnd(t *testing.T) {
	root := tree(t, 9*openLevels, func(i int) string { return strings.Repeat("m/", i/3) + []string{"a", "m", "z"}[i%3] + "/below" })
	changed, err := ApplyGroup(t.Context(), root, uint32(os.Getegid()), volume.GroupAlways)
	check.That(t, err == nil && changed == 2*9*openLevels+1, "%d changed: %v", changed, err)
}

func TestWalkHasAnEnd(t *testing.T) {
	open := func() *os.File { return check.Value(os.Open(t.TempDir()))(t) }
	w := walk{ctx: t.Context(), levels: make([]level, mostLevels)}
	check.Fails(t, w.enter(open(), "deep"), "more than 100000 directories deep")
	w.close()
	dir := open()
	check.Must(t, os.Mkdir(dir.Name()+"/sub", 0o700))
	entries := make([]byte, 4096)
	n := check.Value(unix.Getdents(fdOf(dir), entries))(t)
	w = walk{ctx: t.Context(), gid: uint32(os.Getegid()), levels: []level{{dir: dir, entries: entries[:n], resumed: math.MaxInt64}}}
	defer w.close()
	err := w.step()
	for err == nil && len(w.levels) == 1 {
		err = w.step()
	}
	check.Fails(t, err, "two entries at one offset")
}

func FuzzSuperblock(f *testing.F) {
	seed := make([]byte, 2048)
	seed[extStart+extMagic], seed[extStart+extMagic+1], seed[extStart+extGroupBlocks+1] = 0x53, 0xef, 0x80
	f.Add(seed, int64(1<<30))
	f.Fuzz(func(_ *testing.T, raw []byte, device int64) {
		if super, err := readExt(bytes.NewReader(raw)); err == nil && super != nil && device >= 0 {
			_ = super.fill(device)
		}
	})
}

func TestXFSLeavesASmallRest(t *testing.T) {
	is := xfsGeometry{Block: 4096, GroupBlocks: 1000}
	for blocks, want := range map[int64]uint64{3000: 3000, 3063: 3000, 3064: 3064, 999: 999, 63: 0} {
		check.Equal(t, is.fill(blocks*4096+100), want, "%d blocks", blocks)
	}
}

func TestFilesystemsThatNameOtherDevices(t *testing.T) {
	for name, c := range map[string]struct {
		fsType string
		at     int
		bytes  []byte
		want   string
	}{
		"ext4":                                {"ext4", extStart + extJournalDev, nil, ""},
		"ext4 with its journal elsewhere":     {"ext4", extStart + extJournalDev, []byte{0x10, 8}, "journal on another device"},
		"ext4 whose journal is no file of it": {"ext4", extStart + extJournalIno, []byte{0}, "journal on another device"},
		"ext3 with its journal elsewhere":     {"ext3", extStart + extJournalDev, []byte{0x10, 8}, "journal on another device"},
		"btrfs":                               {"btrfs", btrfsStart + btrfsDevicesAt, []byte{1}, ""},
		"btrfs of two devices":                {"btrfs", btrfsStart + btrfsDevicesAt, []byte{2}, "has 2 devices"},
		"xfs, with what would be ext4's word": {"xfs", extStart + extJournalDev, []byte{0x10, 8}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			image := make([]byte, btrfsStart+4096)
			copy(image[extStart+extMagic:], "\x53\xef")
			image[extStart+extGroupBlocks] = 1
			image[extStart+extCompat] = extHasJournal
			image[extStart+extJournalIno] = 8
			copy(image[btrfsStart+btrfsMagicAt:], btrfsMagic)
			copy(image[c.at:], c.bytes)
			err := oneDevice(bytes.NewReader(image), c.fsType)
			check.That(t, (err == nil) == (c.want == "") && (err == nil || strings.Contains(err.Error(), c.want)), "%v", err)
		})
	}
	check.That(t, oneDevice(bytes.NewReader(nil), "ext4") != nil, "a device that cannot be read is fine")
}

// The size of its argument is part of a request's number.
func TestArgumentsHaveTheSizesOfTheirRequests(t *testing.T) {
	for name, arg := range map[string]struct {
		request uint
		size    uintptr
	}{
		"resize":    {btrfsIocResize, unsafe.Sizeof(btrfsVolArgs{})},
		"dev info":  {btrfsIocDevInfo, unsafe.Sizeof(btrfsDevInfo{})},
		"fs info":   {btrfsIocFSInfo, unsafe.Sizeof(btrfsFSInfo{})},
		"geometry":  {xfsIocGeometry, unsafe.Sizeof(xfsGeometry{})},
		"growfs":    {xfsIocGrowData, unsafe.Sizeof(xfsGrowData{})},
		"dev stats": {btrfsIocGetDevStats, unsafe.Sizeof(btrfsDevStats{})},
	} {
		want := uintptr(arg.request >> 16 & 0x3fff)
		check.That(t, arg.size == want, "%s: %d bytes instead of %d", name, arg.size, want)
	}
}

func TestUsageCountsAsDF(t *testing.T) {
	fs := unix.Statfs_t{Bsize: 4096, Frsize: 512, Blocks: 100, Bfree: 40, Bavail: 30, Files: 10, Ffree: 4}
	want := []abi.Usage{{Available: 30 * 512, Total: 100 * 512, Used: 60 * 512, Unit: abi.UnitBytes}, {Available: 4, Total: 10, Used: 6, Unit: abi.UnitInodes}}
	got := usage(&fs)
	check.That(t, len(got) == 2 && got[0] == want[0] && got[1] == want[1], "%+v instead of %+v", got, want)
	fs.Files, fs.Ffree = 0, 0
	got = usage(&fs)
	check.That(t, len(got) == 1, "inodes of a filesystem that has none: %+v", got)
	fs.Blocks, fs.Bfree, fs.Bavail = math.MaxUint64, math.MaxUint64, 1
	huge := usage(&fs)[0]
	check.That(t, huge.Total == math.MaxInt64 && huge.Used == 0 && huge.Available == 512, "a huge one: %+v", huge)
	fs.Blocks, fs.Bfree = 1, 2
	got = usage(&fs)
	check.That(t, got[0].Used == 0, "more free than there is: %+v", got)
}

func TestForgottenFreezeHidesNothing(t *testing.T) {
	whole := report(nil, nil).Condition
	addHeld(whole)
	check.That(t, whole.Abnormal && whole.Reason == abi.ReasonFrozen && whole.Message != "", "%+v", whole)
	broken := report(nil, []fault{{abi.ReasonErrors, "errors"}, {abi.ReasonShutDown, "shut down"}}).Condition
	addHeld(broken)
	check.That(t, broken.Reason == abi.ReasonShutDown && broken.Message == "errors; shut down; "+whole.Message, "%+v", broken)
}

// TestGrowthIsNotCutOff ends the caller's context while resize2fs is at work: a
// filesystem that is half grown may be lost. No limit ends it either.
func TestGrowthIsNotCutOff(t *testing.T) {
	dir := t.TempDir()
	device, begun, more := filepath.Join(dir, "device"), filepath.Join(dir, "begun"), filepath.Join(dir, "more")
	image := make([]byte, 1<<20)
	copy(image[extStart+extMagic:], "\x53\xef")
	image[extStart+extGroupBlocks+1] = 0x80
	check.Must(t, os.WriteFile(device, image, 0o600))
	// A confined program can write to no file but the device; it can set times.
	check.Must(t, os.WriteFile(begun, nil, 0o600))
	check.Must(t, os.Chtimes(begun, time.Time{}, time.Unix(0, 0)))
	check.Must(t, unix.Mkfifo(more, 0o600))
	for name, script := range map[string]string{
		"e2fsck": "exit 1", "resize2fs": "touch -c " + begun + "; read _ < " + more +
			"; [ \"$(ulimit -t) $(ulimit -v) $(read -r oom </proc/self/oom_score_adj; echo $((oom < 1000)))\" = 'unlimited unlimited 1' ] && echo grown 1<> " + device,
	} {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755)) //nolint:gosec // a program
	}
	t.Setenv("PATH", dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := check.Begin(func() error { return GrowUnmounted(ctx, device, "ext4") })
	check.Eventually(t, "resize2fs was begun", func() bool {
		info, err := os.Stat(begun)
		return err == nil && info.ModTime().Unix() != 0
	})
	cancel()
	// Open for both, it waits for no reader: there may be none any more.
	fifo := check.Value(os.OpenFile(more, os.O_RDWR, 0))(t)
	defer func() { _ = fifo.Close() }()
	check.Value(fifo.WriteString("\n"))(t)
	check.Must(t, <-done)
	is, err := os.ReadFile(device)
	check.That(t, err == nil && strings.HasPrefix(string(is), "grown\n"), "resize2fs did not end its work: %.20q, %v", is, err)
}
